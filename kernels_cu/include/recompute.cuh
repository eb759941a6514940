// p and ds from recomputed scores, one element at a time: what both backward kernels do between their products.
#pragma once
#include "common.cuh"
#include "params.cuh"
#include "ptx/math.cuh"
#include "score.cuh"

namespace cuflash {

// Whether lse is so large that fl(lse * log2(e)) no longer meets s * c within a fraction. Rows of lse +inf do not
// count.
__device__ __forceinline__ bool is_large_lse(float lse) {
  return fabsf(lse) >= kLargeExponent * kLn2 && lse < pos_inf();
}

// p = exp(s - lse) of a score as the products leave it. lse is +inf for rows beyond the length and rows without keys:
// p = 0. At most 1 in exact arithmetic: the comparison keeps the rounding of lse from making it inf, and lets NaN pass.
// From 2^24 on the difference is taken first, in natural units, of products rounded as the forward rounded them: one
// contracted to an FMA would leave the rounding of lse, which can be thousands, in the exponent.
template <bool kLarge>
__device__ __forceinline__ float probability(const Params& params, float s, float lse) {
  const float exponent = kLarge && is_large_lse(lse) ? __fsub_rn(__fmul_rn(s, params.lse_scale), lse) * kLog2E
                                                     : fmaf(s, params.exponent_scale, -lse * kLog2E);
  return ex2(exponent > 0.f ? 0.f : exponent);
}

}  // namespace cuflash
