// Score terms in the order of the contract: scale, softcap, key_bias, masks. Logical positions in, values out.
#pragma once
#include "common.cuh"
#include "params.cuh"
#include "ptx/math.cuh"

namespace cuflash {

struct ValueAndSlope {
  float value, slope;
};

// tanh with a relative error near 2^-22 everywhere: 1 - 2 / (1 + e^2x) cancels near zero, a Taylor polynomial does not.
__device__ __forceinline__ float tanh_exact(float x) {
  const float x2 = x * x;
  const float series = x * (1.f + x2 * (-1.f / 3 + x2 * (2.f / 15 + x2 * (-17.f / 315 + x2 * (62.f / 2835)))));
  const float ratio = 1.f - 2.f * rcp(1.f + ex2(2.f * kLog2E * x));
  return fabsf(x) < 0.3f ? series : ratio;
}

// s -> cap * tanh(s / cap). A cap of 0 stands for none: one variant serves calls with and without.
struct Softcap {
  static __device__ __forceinline__ ValueAndSlope value_and_slope(const Params& params, float s) {
    if (params.softcap == 0.f) return {s, 1.f};
    const float t = tanh_exact(s / params.softcap);
    return {params.softcap * t, 1.f - t * t};
  }
};

// Natural-log weight of a key; null stands for none. A key of weight -inf is absent, whatever its score.
struct KeyBias {
  const float* bias_gmem;
  i64 stride;
  __device__ __forceinline__ float value(int key) const { return bias_gmem == nullptr ? 0.f : bias_gmem[key * stride]; }
  static __device__ __forceinline__ float add(float s, float bias) { return bias == neg_inf() ? bias : s + bias; }
};

// The terms before the masks, in their order, of a (query, key) that exists: the final score and its slope with respect
// to scale * q.k. The product is rounded by itself: forward and backward must form the same score.
__device__ __forceinline__ ValueAndSlope apply_terms(const Params& params, float s, float bias) {
  if constexpr (kPrescaled) s = __fmul_rn(s, params.scale);
  ValueAndSlope r{s, 1.f};
  if constexpr (kSoftcap) r = Softcap::value_and_slope(params, s);
  if constexpr (kKeyBias) r.value = KeyBias::add(r.value, bias);
  return r;
}

// Causal and window as one run-time term.
struct Band {
  int lo, hi;
  __device__ __forceinline__ bool keeps(int row, int key) const { return key >= row + lo && key <= row + hi; }
};

}  // namespace cuflash
