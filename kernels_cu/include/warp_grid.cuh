// How the warps of a CTA divide a block of scores: a grid of row warps by column warps.
//
// Warps in one row of the grid hold the same rows and different columns of the scores, and of the product that follows
// the same rows and different features. What they owe each other goes through shared memory: row maxima and sums, and
// the left operand of that product, which each of them needs whole.
#pragma once
#include "fragment.cuh"
#include "ptx/barrier.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps;
constexpr int kColumnWarps = kTile.column_warps, kRowWarps = kTile.warps / kColumnWarps;
constexpr bool kShareOperands = kColumnWarps > 1;
static_assert(kRowWarps * kColumnWarps == kTile.warps, "the warps fill the grid");

__device__ __forceinline__ int warp_row() { return warp_id() / kColumnWarps; }
__device__ __forceinline__ int warp_column() { return warp_id() % kColumnWarps; }

// A barrier of the warps that share rows.
__device__ __forceinline__ void sync_row() { barrier_sync<32 * kColumnWarps>(1 + warp_row()); }

// One number of each row of the block from each column warp.
template <int kRows>
struct RowExchange {
  Accumulator value[kColumnWarps][kRows];
};

// Combines what the column warps hold of each row slot, in the same order in every warp. All threads of the CTA take
// part; before the next exchange there must be a barrier.
template <int kSlots, int kRows, class Combine>
__device__ __forceinline__ void exchange(RowExchange<kRows>& smem, Accumulator (&x)[kSlots], int row0,
                                         Combine combine) {
  const int lane_row0 = row0 + lane_id() / 4;
#pragma unroll
  for (int r = 0; r < kSlots; ++r)
    if (lane_id() % 4 == 0) smem.value[warp_column()][lane_row0 + 8 * r] = x[r];
  __syncthreads();  // the numbers of all warps are there
#pragma unroll
  for (int r = 0; r < kSlots; ++r) {
    x[r] = smem.value[0][lane_row0 + 8 * r];
#pragma unroll
    for (int column = 1; column < kColumnWarps; ++column) x[r] = combine(x[r], smem.value[column][lane_row0 + 8 * r]);
  }
}

}  // namespace cuflash
