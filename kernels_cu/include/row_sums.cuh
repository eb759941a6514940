// What has been summed of a row: sums of p and of p v, all against one reference. Results over disjoint keys merge so
// without going through a rounded lse, which from large scores on has no fraction left.
#pragma once
#include "softmax.cuh"

namespace cuflash {

// 2^x lane by lane: the table of Exp2Double belongs to whole warps.
struct LaneExp2 {
  __device__ __forceinline__ float operator()(float x) const { return ex2(x); }
  __device__ __forceinline__ double operator()(double x) const { return exp2(x); }
};

__device__ __forceinline__ Accumulator warp_max(Accumulator x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = larger(x, __shfl_xor_sync(kFullWarp, x, lanes));
  return x;
}
__device__ __forceinline__ Accumulator warp_sum(Accumulator x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kFullWarp, x, lanes);
  return x;
}

template <int kColumns>
struct RowSums {
  Accumulator max = neg_inf();          // the reference, in natural units
  Accumulator sums[1 + kColumns] = {};  // of p, then of p v by column

  template <class Exp>
  __device__ __forceinline__ void move_to(Accumulator new_max, const Exp& exp2) {
    const Accumulator rescale = Reference(new_max, kLog2E).rescale_from(Reference(max, kLog2E), exp2);
    max = new_max;
#pragma unroll
    for (int i = 0; i <= kColumns; ++i) sums[i] *= rescale;
  }
  __device__ __forceinline__ void merge(RowSums other) {
    const Accumulator both = larger(max, other.max);
    move_to(both, LaneExp2{});
    other.move_to(both, LaneExp2{});
#pragma unroll
    for (int i = 0; i <= kColumns; ++i) sums[i] += other.sums[i];
  }
  // lse, and the factor that makes o an average.
  __device__ __forceinline__ void finish(Accumulator& o_scale, Accumulator& lse) const {
    Reference(max, kLog2E).finish(sums[0], Accumulator(1), o_scale, lse);
  }
};

}  // namespace cuflash
