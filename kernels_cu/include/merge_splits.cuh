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

// o and lse of a row: `row` of its batch position.
template <int kColumns>
__device__ __forceinline__ void store_row(const Params& params, const BatchIndex& batch, int row, int column0,
                                          const RowSums<kColumns>& sums) {
  Accumulator o_scale, lse;
  sums.finish(o_scale, lse);
  if (column0 == 0 && params.lse != nullptr)
    base<Accumulator>(params.lse, params.lse_stride, batch)[row * params.lse_stride.row] = lse;
  Output* o_gmem = base<Output>(params.o, params.o_stride, batch) + row * params.o_stride.row;
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (column0 + c < params.value_dim)
      o_gmem[(column0 + c) * params.o_stride.col] = from_float<Output>(sums.sums[1 + c] * o_scale);
}

// What all splits have left of a row, to o and lse, by one warp: the lanes over the splits. Maxima come first, so that
// each part is rescaled once.
__device__ __forceinline__ void merge_row(const Params& params, int owned, int row) {
  constexpr int kColumns = 4;  // at a time
  const i64 index = i64(owned) * params.seqlen_q + row;
  const Accumulator* maxima = split_parts(params, index, 0);
  Accumulator max = neg_inf();
#pragma unroll 8
  for (int split = lane_id(); split < params.splits; split += 32) max = larger(max, load_part(maxima + split));
  max = warp_max(max);
  for (int column0 = 0; column0 < max_of(1, params.value_dim); column0 += kColumns) {
    RowSums<kColumns> merged{max};
#pragma unroll 2
    for (int split = lane_id(); split < params.splits; split += 32) {
      RowSums<kColumns> part{load_part(maxima + split), {load_part(split_parts(params, index, 1) + split)}};
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (column0 + c < params.value_dim)
          part.sums[1 + c] = load_part(split_parts(params, index, 2 + column0 + c) + split);
      part.move_to(max, LaneExp2{});
#pragma unroll
      for (int i = 0; i <= kColumns; ++i) merged.sums[i] += part.sums[i];
    }
#pragma unroll
    for (int i = 0; i <= kColumns; ++i) merged.sums[i] = warp_sum(merged.sums[i]);
    if (lane_id() == 0) store_row(params, batch_index(params, owned, 0), row, column0, merged);
  }
}

}  // namespace cuflash
