// Results of one warp from registers to global memory, through the warp's own rows of a tile in shared memory.
#pragma once
#include "fragment.cuh"

namespace cuflash {

// Rounds 16 * kMTiles rows of accumulators and writes those below valid_rows. `smem` rows row0.. belong to this warp
// alone, so a warp barrier orders everything.
template <class Output, int kMTiles, int kCols, class SharedT>
__device__ __forceinline__ void store_rows(Fragment<kMTiles, kCols>& f, SharedT& smem, int row0, u16* gmem, i64 row_stride,
                                           i64 col_stride, int valid_rows, int valid_cols, bool vector) {
  static_assert(sizeof(Output) == 2, "wider outputs go straight from registers");
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u16* to = smem.at(row0 + 16 * m + 8 * h + lane_id() / 4, n) + 2 * (lane_id() % 4);
        *reinterpret_cast<u32*>(to) = pack<Output>(f.x[m][n][2 * h], f.x[m][n][2 * h + 1]);
      }
  __syncwarp();  // the rows are complete before other lanes read them
  constexpr int kRowChunks = kCols / kChunk;
  for (int i = lane_id(); i < 16 * kMTiles * kRowChunks; i += 32) {
    const int row = i / kRowChunks, chunk = i % kRowChunks, valid = min_of(kChunk, valid_cols - kChunk * chunk);
    if (row0 + row >= valid_rows || valid <= 0) continue;
    const u16* from = smem.at(row0 + row, chunk);
    u16* to = gmem + (row0 + row) * row_stride + kChunk * chunk * col_stride;
    if (vector && valid == kChunk) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < valid; ++e) to[e * col_stride] = from[e];
    }
  }
  __syncwarp();  // the rows may be written again
}

}  // namespace cuflash
