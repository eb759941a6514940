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
  if constexpr (kKeyBias) r.value += bias;
  return r;
}

// p = exp(s - lse). At most 1 in exact arithmetic: the minimum keeps the rounding of a large lse from making it inf.
// lse2 is +inf for rows beyond the length and rows without keys: p = 0.
__device__ __forceinline__ float probability(float s, float exponent_scale, float lse2) {
  return ex2(fminf(fmaf(s, exponent_scale, -lse2), 0.f));
}

}  // namespace cuflash
