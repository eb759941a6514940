// p and ds from recomputed scores, one element at a time: what both backward kernels do between their products.
#pragma once
#include "common.cuh"
#include "params.cuh"
#include "ptx/math.cuh"
#include "score.cuh"

namespace cuflash {

// Score terms of (query, key), known to exist: the final score and its slope with respect to scale * q.k.
__device__ __forceinline__ ValueAndSlope score(const Params& p, float s, float bias) {
  if constexpr (kPrescaled) s *= p.scale;
  ValueAndSlope r{s, 1.f};
  if constexpr (kSoftcap) r = Softcap::value_and_slope(p, s);
  if constexpr (kKeyBias) r.value = KeyBias::add(r.value, bias);
  return r;
}

// Whether lse is so large that fl(lse * log2(e)) no longer meets s * c within a fraction. Rows of lse +inf do not
// count.
__device__ __forceinline__ bool is_large_lse(float lse) {
  return fabsf(lse) >= kLargeExponent * kLn2 && lse < pos_inf();
}

// p = exp(s - lse) of a score as the products leave it. At most 1 in exact arithmetic: the minimum keeps the rounding
// of lse from making it inf. lse is +inf for rows beyond the length and rows without keys: p = 0. From 2^24 on the
// difference is taken first, in natural units, where lse was formed by the same rounding of the same score.
template <bool kLarge>
__device__ __forceinline__ float probability(const Params& p, float s, float lse) {
  const float exponent =
      kLarge && is_large_lse(lse) ? (s * p.lse_scale - lse) * kLog2E : fmaf(s, p.exponent_scale, -lse * kLog2E);
  return ex2(fminf(exponent, 0.f));
}

}  // namespace cuflash
