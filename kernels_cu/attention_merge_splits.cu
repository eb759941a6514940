// What a forward whose keys were split over the grid has left, merged to o and lse: one warp a row, the lanes over the
// splits, in an order that depends on their number alone.
#include "locate.cuh"
#include "ptx/convert.cuh"
#include "row_sums.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps, kColumns = 4;  // columns of o at a time

__device__ __forceinline__ void attention_merge_splits(const Params& params) {
  const i64 index = i64(work_index()) * kTile.warps + warp_id();
  if (index >= i64(owned_count(params)) * params.seqlen_q) return;
  const BatchIndex batch = batch_index(params, int(index / params.seqlen_q), 0);
  const i64 row = index % params.seqlen_q;
  for (int column0 = 0; column0 < max_of(1, params.value_dim); column0 += kColumns) {
    const int columns = min_of(kColumns, params.value_dim - column0);
    RowSums<kColumns> merged;
#pragma unroll 4
    for (int split = lane_id(); split < params.splits; split += 32) {
      const Accumulator* left = split_row(params, split, index);
      RowSums<kColumns> own{left[0], {left[1]}};
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (c < columns) own.sums[1 + c] = left[2 + column0 + c];
      merged.merge(own);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      RowSums<kColumns> other;
      other.max = __shfl_xor_sync(kFullWarp, merged.max, lanes);
#pragma unroll
      for (int i = 0; i <= kColumns; ++i) other.sums[i] = __shfl_xor_sync(kFullWarp, merged.sums[i], lanes);
      merged.merge(other);
    }
    if (lane_id() != 0) continue;
    Accumulator o_scale, lse;
    merged.finish(o_scale, lse);
    if (column0 == 0 && params.lse != nullptr)
      base<Accumulator>(params.lse, params.lse_stride, batch)[row * params.lse_stride.row] = lse;
    Output* o_gmem = base<Output>(params.o, params.o_stride, batch) + row * params.o_stride.row;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (c < columns)
        o_gmem[(column0 + c) * params.o_stride.col] = from_float<Output>(merged.sums[1 + c] * o_scale);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  cuflash::attention_merge_splits(params);
}
