// Results of one warp from registers to global memory, through the warp's own rows of a tile in shared memory.
#pragma once
#include "fragment.cuh"
#include "params.cuh"

namespace cuflash {

// Rounds the warp's accumulators and writes them to rows tile_row0 + row0 and following of a (length, cols) array.
// Rows row0.. of `smem` belong to this warp alone, so a warp barrier orders everything.
template <class T, int kMTiles, int kCols, class SharedT>
__device__ __forceinline__ void store_rows(const Fragment<kMTiles, kCols>& f, SharedT& smem, int row0, u16* gmem,
                                           const Strides& stride, int tile_row0, int length, int cols, bool vector) {
  static_assert(sizeof(T) == 2, "wider outputs go straight from registers");
  __syncwarp();  // all lanes have read the tile that lay in these rows
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u16* to = smem.at(row0 + 16 * m + 8 * h + lane_id() / 4, n) + 2 * (lane_id() % 4);
        *reinterpret_cast<u32*>(to) = pack<T>(f.x[m][n][2 * h], f.x[m][n][2 * h + 1]);
      }
  __syncwarp();  // the rows are complete before other lanes read them
  constexpr int kRowChunks = kCols / kChunk;
  for (int i = lane_id(); i < 16 * kMTiles * kRowChunks; i += 32) {
    const int row = i / kRowChunks, chunk = i % kRowChunks, valid = min_of(kChunk, cols - kChunk * chunk);
    if (tile_row0 + row0 + row >= length || valid <= 0) continue;
    const u16* from = smem.at(row0 + row, chunk);
    u16* to = gmem + (tile_row0 + row0 + row) * stride.row + kChunk * chunk * stride.col;
    if (vector && valid == kChunk) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < valid; ++e) to[e * stride.col] = from[e];
    }
  }
  __syncwarp();  // the rows may be written again
}

}  // namespace cuflash
