// How CTAs of the forward for few features share out rows and keys, and what becomes of the sums of their warps.
#pragma once
#include "blocks.cuh"
#include "merge_splits.cuh"

namespace cuflash {

// x / key_warps, which is a power of two.
__device__ __forceinline__ int over_key_warps(const Params& params, int x) {
  return x >> (__ffs(params.key_warps) - 1);
}

// Which of them this warp is.
__device__ __forceinline__ int key_warp(const Params& params) { return warp_id() & (params.key_warps - 1); }

// A warp's first row, and the steps of keys that its rows see.
struct WarpWork {
  int row0;
  BlockRange steps;
};

// By kRows rows a warp: none of its steps for a warp beyond the last row.
template <int kRows>
__device__ __forceinline__ WarpWork warp_work(const Params& params, int row0, int step_keys) {
  if (row0 >= params.seqlen_q) return {row0, {0, 0, 0, 0}};
  return {row0, key_blocks(params, row0, min_of(row0 + kRows, params.seqlen_q), step_keys)};
}

// Where a CTA works: rows [row0, row0 + rows) of a batch position, and a part of their keys.
template <int kRows>
struct CtaWork {
  int rows, row0, split, owned;

  __device__ __forceinline__ explicit CtaWork(const Params& params)
      : rows(over_key_warps(params, kTile.warps) * kRows) {
    const SplitWork work = locate_split_rows(params.seqlen_q, rows, params.splits);
    row0 = work.block * rows, split = work.split, owned = work.owned;
  }
  __device__ __forceinline__ int warp_row0(const Params& params) const {
    return row0 + over_key_warps(params, warp_id()) * kRows;
  }
};

// The warps' totals of each row, merged; to o and lse, or to what this split leaves.
template <int kRows, class Totals>
__device__ __forceinline__ void store_results(const Params& params, const Totals* totals) {
  const CtaWork<kRows> work(params);
  constexpr int kColumns = power_of_two_from(kTile.value_dim);
  const int columns = max_of(1, params.value_dim), rows = min_of(work.rows, params.seqlen_q - work.row0);
  for (int i = threadIdx.x; i < rows * kColumns; i += 32 * kTile.warps) {
    const int r = i / kColumns, column = i % kColumns, row = work.row0 + r;
    if (column >= columns) continue;
    RowSums<1> merged;
#pragma unroll 1
    for (int w = 0; w < params.key_warps; ++w)
      merged.merge(totals[r / kRows * params.key_warps + w].column(r % kRows, column));
    if (params.splits == 1) {
      store_row(params, work.owned, row, column, merged);
    } else {
      store_split(params, i64(work.owned) * params.seqlen_q + row, work.split, column, merged);
    }
  }
}

}  // namespace cuflash
