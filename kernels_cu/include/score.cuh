// Score terms in the order of the contract: scale, softcap, key_bias, masks. Logical positions in, values out.
#pragma once
#include "common.cuh"
#include "params.cuh"

namespace cuflash {

struct ValueAndSlope {
  Accumulator value, slope;
};

// s -> cap * tanh(s / cap). A cap of 0 stands for none: one variant serves calls with and without.
struct Softcap {
  static __device__ __forceinline__ ValueAndSlope value_and_slope(const Params& params, Accumulator s) {
    if (params.softcap == 0) return {s, 1};
    const Accumulator t = tanh_exact(s / params.softcap);
    return {params.softcap * t, 1 - t * t};
  }
};

// Natural-log weight of a key; null stands for none. A key of weight -inf is absent, whatever its score.
struct KeyBias {
  const Accumulator* bias_gmem;
  i64 stride;
  __device__ __forceinline__ Accumulator value(int key) const {
    return bias_gmem == nullptr ? 0 : bias_gmem[key * stride];
  }
  static __device__ __forceinline__ Accumulator add(Accumulator s, Accumulator bias) {
    return bias == neg_inf() ? bias : s + bias;
  }
};

// The terms before the masks, in their order, of a (query, key) that exists: the final score and its slope with respect
// to scale * q.k. The product is rounded by itself: forward and backward must form the same score, as they do where the
// same products made it: not in float32 where the forward multiplies without tensor cores (few features) or in planes
// (sm_90).
__device__ __forceinline__ ValueAndSlope apply_terms(const Params& params, Accumulator s, Accumulator bias) {
  if constexpr (kPrescaled) s = mul_rn(s, params.scale);
  ValueAndSlope r{s, 1};
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
