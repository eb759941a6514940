// Results of one warp from registers to global memory, through the warp's own part of a tile in shared memory.
#pragma once
#include "fragment.cuh"
#include "params.cuh"
#include "store.cuh"

namespace cuflash {

// Rounds the warp's accumulators and writes them to rows tile_row0 + row0.. and columns col0.. of a (length, cols)
// array. Those of `smem` belong to this warp alone, so a warp barrier orders everything.
template <int kMTiles, int kCols, class T, int kRows, int kTileCols>
__device__ __forceinline__ void store_rows(const Fragment<kMTiles, kCols>& f, SharedTile<T, kRows, kTileCols>& smem,
                                           int row0, int col0, T* gmem, const Strides& stride, int tile_row0,
                                           int length, int cols, bool vector) {
  __syncwarp();  // all lanes have read the tile that lay in these rows
  store_fragment(f, smem, row0, col0);
  __syncwarp();  // the rows are complete before other lanes read them
  constexpr int kChunk = kChunkOf<T>, kRowChunks = kCols / kChunk;
  for (int i = lane_id(); i < 16 * kMTiles * kRowChunks; i += 32) {
    const int row = i / kRowChunks, chunk = col0 / kChunk + i % kRowChunks;
    const int valid = min_of(kChunk, cols - kChunk * chunk);
    if (tile_row0 + row0 + row >= length || valid <= 0) continue;
    const T* from = smem.at(row0 + row, chunk);
    T* to = gmem + (tile_row0 + row0 + row) * stride.row + kChunk * chunk * stride.col;
    if (vector && valid == kChunk) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < valid; ++e) to[e * stride.col] = from[e];
    }
  }
  __syncwarp();  // the rows may be written again
}

}  // namespace cuflash
