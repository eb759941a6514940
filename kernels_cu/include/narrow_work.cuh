// How CTAs of the forward for few features share out rows and keys, and what becomes of the sums of their warps.
#pragma once
#include "blocks.cuh"
#include "merge_splits.cuh"

namespace cuflash {

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

  __device__ __forceinline__ explicit CtaWork(const Params& params) : rows(kTile.warps / params.key_warps * kRows) {
    const SplitWork work = locate_split_rows(ceil_div(params.seqlen_q, rows), params.splits);
    row0 = work.block * rows, split = work.split, owned = work.owned;
  }
};

// The warps' totals of each row, merged; to o and lse, or to what this split leaves.
template <int kRows, class Totals>
__device__ __forceinline__ void store_results(const Params& params, const Totals* totals) {
  const CtaWork<kRows> work(params);
  const BatchIndex batch = batch_index(params, work.owned, 0);
  const int columns = max_of(1, params.value_dim), rows = min_of(work.rows, params.seqlen_q - work.row0);
  for (int i = threadIdx.x; i < rows * columns; i += 32 * kTile.warps) {
    const int r = i / columns, column = i % columns, row = work.row0 + r;
    RowSums<1> merged;
    for (int w = 0; w < params.key_warps; ++w)
      merged.merge(totals[r / kRows * params.key_warps + w].column(r % kRows, column));
    if (params.splits == 1) {
      store_row(params, batch, row, column, merged);
      continue;
    }
    const i64 index = i64(work.owned) * params.seqlen_q + row;
    const auto leave = [&](int at, Accumulator x) { split_parts(params, index, at)[work.split] = x; };
    if (column == 0) leave(0, merged.max), leave(1, merged.sums[0]);
    if (params.value_dim > 0) leave(2 + column, merged.sums[1]);
  }
}

}  // namespace cuflash
