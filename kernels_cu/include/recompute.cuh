// p and ds from recomputed scores, one element at a time: what both backward kernels do between their products.
#pragma once
#include "common.cuh"
#include "params.cuh"
#include "score.cuh"

namespace cuflash {

// Whether lse is so large that fl(lse * log2(e)) no longer meets s * c within a fraction. Rows of lse +inf do not
// count.
__device__ __forceinline__ bool is_large_lse(Accumulator lse) {
  return fabs(lse) >= kLargeExponent * kLn2 && lse < pos_inf();
}

// p = exp(s - lse) of a score as the products leave it. lse is +inf for rows beyond the length and rows without keys:
// p = 0. At most 1 in exact arithmetic: the comparison keeps the rounding of lse from making it inf, and lets NaN pass.
// From 2^24 on the difference is taken first, in natural units, of products rounded as the forward rounded them: one
// contracted to an FMA would leave the rounding of lse, which can be thousands, in the exponent.
template <bool kLarge>
__device__ __forceinline__ Accumulator probability(const Params& params, const Exp2& exp2, Accumulator s,
                                                   Accumulator lse) {
  const Accumulator exponent = kLarge && is_large_lse(lse) ? add_rn(mul_rn(s, params.lse_scale), -lse) * kLog2E
                                                           : fma(s, params.exponent_scale, -lse * kLog2E);
  return exp2.flushed(exponent > 0 ? 0 : exponent);
}

}  // namespace cuflash
