// Results of one warp from registers to global memory, through the warp's own part of a tile in shared memory.
#pragma once
#include "locate.cuh"
#include "softmax.cuh"
#include "store.cuh"

namespace cuflash {

// Makes o of the warp's rows the average that it is the sum of; their lse. `sum` is over whole rows.
template <int kMTiles, int kCols, class Softmax>
__device__ __forceinline__ void average_rows(Fragment<kMTiles, kCols>& o, const Softmax& softmax,
                                             const Accumulator (&sum)[2 * kMTiles], const Params& params,
                                             Accumulator (&lse)[2 * kMTiles]) {
  Accumulator o_scale[2 * kMTiles];
#pragma unroll
  for (int r = 0; r < 2 * kMTiles; ++r) softmax.reference(r).finish(sum[r], params.lse_scale, o_scale[r], lse[r]);
  o.for_each([&](Accumulator& x, int slot, int, int) { x *= o_scale[slot]; });
}

// Where there is one to write: lse of the rows that `o` holds, from row0 on.
template <int kMTiles, int kCols>
__device__ __forceinline__ void write_lse(const Fragment<kMTiles, kCols>& o, const Accumulator (&lse)[2 * kMTiles],
                                          const Params& params, const BatchIndex& batch, int row0) {
  if (params.lse == nullptr || lane_id() % 4 != 0) return;  // one lane of those that share the row
  Accumulator* lse_gmem = base<Accumulator>(params.lse, params.lse_stride, batch) + row0 * params.lse_stride.row;
  o.for_each_row([&](int r, int row) {
    if (row0 + row < params.seqlen_q) lse_gmem[row * params.lse_stride.row] = lse[r];
  });
}

// Both. `writes`: of the warps that share the rows, one.
template <int kMTiles, int kCols, class Softmax>
__device__ __forceinline__ void finish_rows(Fragment<kMTiles, kCols>& o, const Softmax& softmax,
                                            const Accumulator (&sum)[2 * kMTiles], const Params& params,
                                            const BatchIndex& batch, int row0, bool writes) {
  Accumulator lse[2 * kMTiles];
  average_rows(o, softmax, sum, params, lse);
  if (writes) write_lse(o, lse, params, batch, row0);
}

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
