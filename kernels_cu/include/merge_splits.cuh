// The end of a forward whose keys the grid splits: each CTA leaves what it has summed of its rows; that is merged, in
// an order that depends on the number of splits alone, by another kernel or by the CTA that is last.
#pragma once
#include "locate.cuh"
#include "ptx/convert.cuh"
#include "row_sums.cuh"

namespace cuflash {

// Past L1: CTAs on other SMs have written it.
__device__ __forceinline__ float load_part(const float* x) { return __ldcg(x); }
__device__ __forceinline__ double load_part(const double* x) { return __ldcg(x); }

// By all threads of a CTA, once they have left their part: whether all other CTAs that count here have left theirs. The
// last of them leaves the count at 0, for the next launch.
__device__ __forceinline__ bool is_last_split(u32& count, int splits) {
  __syncthreads();  // the part is complete
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();  // it comes before the count
    last = atomicInc(&count, splits - 1) == splits - 1;
  }
  last = __syncthreads_or(last);
  if (last) __threadfence();  // the count comes before the others' parts
  return last;
}

// What a split has summed of row `row` of all the batch is kept by columns: reference, sum of p, sums of p v, each of
// all splits.
__device__ __forceinline__ Accumulator* split_parts(const Params& params, i64 row, int split) {
  return params.partials + row * (2 + params.value_dim) * params.splits + split;
}

// Of the columns of p v those from `column0` on.
template <int kColumns>
__device__ __forceinline__ RowSums<kColumns> load_split(const Params& params, i64 row, int split, int column0) {
  const Accumulator* at = split_parts(params, row, split);
  RowSums<kColumns> part{load_part(at), {load_part(at += params.splits)}};
  at += i64(column0) * params.splits;
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (column0 + c < params.value_dim) part.sums[1 + c] = load_part(at += params.splits);
  return part;
}
template <int kColumns>
__device__ __forceinline__ void store_split(const Params& params, i64 row, int split, int column0,
                                            const RowSums<kColumns>& part) {
  Accumulator* at = split_parts(params, row, split);
  if (column0 == 0) at[0] = part.max, at[params.splits] = part.sums[0];
  at += i64(1 + column0) * params.splits;
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (column0 + c < params.value_dim) *(at += params.splits) = part.sums[1 + c];
}

// To all lanes of a warp what they have between them and then, for a whole CTA, what its warps have. Both go through
// the same instructions: at the end of a kernel each is slow the first time, for it has to be fetched.
template <int kColumns>
__device__ __forceinline__ void merge_threads(RowSums<kColumns>& row, RowSums<kColumns> (&smem)[kTile.warps],
                                              bool whole_cta) {
#pragma unroll 1
  for (int level = 0;; ++level) {
    Accumulator max = row.max;
#pragma unroll 1
    for (int lanes = 16; lanes > 0; lanes /= 2) max = larger(max, __shfl_xor_sync(kFullWarp, max, lanes));
    row.move_to(max, LaneExp2{});
#pragma unroll 1
    for (int lanes = 16; lanes > 0; lanes /= 2)
#pragma unroll
      for (int i = 0; i <= kColumns; ++i) row.sums[i] += __shfl_xor_sync(kFullWarp, row.sums[i], lanes);
    if (level == 1 || !whole_cta) return;
    __syncthreads();  // all have read what was there before
    if (lane_id() == 0) smem[warp_id()] = row;
    __syncthreads();  // the rows of all warps are there
    row = {};
    if (lane_id() < kTile.warps) row = smem[lane_id()];
  }
}

// o and lse of a row: `row` of its batch position.
template <int kColumns>
__device__ __forceinline__ void store_row(const Params& params, int owned, int row, int column0,
                                          const RowSums<kColumns>& sums) {
  Accumulator* lse_gmem = params.lse;
  Output* o_gmem = static_cast<Output*>(params.o);
  if (owned > 0) {
    const BatchIndex batch = batch_index(params, owned, 0);
    lse_gmem += offset(params.lse_stride, batch);
    o_gmem += offset(params.o_stride, batch);
  }
  Accumulator o_scale, lse;
  sums.finish(o_scale, lse);
  if (column0 == 0 && params.lse != nullptr) lse_gmem[row * params.lse_stride.row] = lse;
  o_gmem += row * params.o_stride.row + column0 * params.o_stride.col;
#pragma unroll
  for (int c = 0; c < kColumns; ++c, o_gmem += params.o_stride.col)
    if (column0 + c < params.value_dim) *o_gmem = from_float<Output>(sums.sums[1 + c] * o_scale);
}

}  // namespace cuflash
