// Score terms of a warp's scores, in as few instructions as they take: softcap, key_bias from shared memory.
//
// Formed from products are, before the masks: fma(s, scale, bias) with key_bias alone; with softcap alone tanh(x), the
// cap being a factor of the exponent as the scale is where there are no terms; with both fma(tanh(x), cap, bias).
#pragma once
#include "fragment.cuh"
#include "params.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// tanh(x) of z = 5 x. All of a warp's below 0.4, as they are where the cap is well above the scores: an odd polynomial,
// minimax in relative error, within 2^-23.2 of it. z then is below 2: no exponent has its highest bit, which an OR of
// them all shows. Elsewhere 1 - 2 / (1 + e^2x), which cancels near zero: chosen element by element, within 2^-21.
struct Tangent {
  static __device__ __forceinline__ float factor(const Params& params) { return 5 * (params.scale / params.softcap); }
  static __device__ __forceinline__ bool is_small(u32 bits) { return (bits & 0x40000000u) == 0; }

  static __device__ __forceinline__ float of_small(float z) {
    const float z2 = z * z;
    return z * fmaf(fmaf(fmaf(-6.086861503717955e-07f, z2, 4.2467127059353516e-05f), z2, -0.002666509011760354f), z2,
                    0.19999997317790985f);
  }
  static __device__ __forceinline__ float of_any(float z) {
    const float ratio = fmaf(-2.f, rcp(1.f + ex2(z * float(2 * 1.4426950408889634 / 5))), 1.f);
    return fabsf(z) < 2 ? of_small(z) : ratio;
  }

  template <int kCols>
  static __device__ __forceinline__ void apply(Fragment<1, kCols>& s, float factor) {
    u32 bits = 0;
    s.for_each_lane_column([&](float& x, int, int) {
      x *= factor;
      bits |= __float_as_uint(x);
    });
    if (__any_sync(kFullWarp, !is_small(bits))) {
      s.for_each_lane_column([](float& x, int, int) { x = of_any(x); });
    } else {
      s.for_each_lane_column([](float& x, int, int) { x = of_small(x); });
    }
  }
};

// The weights of a block's keys. One of -inf takes its key away whatever the score, where the FMA is right for finite
// scores alone: the warp looks for one once a block.
template <int kKeys>
struct BlockBias {
  alignas(16) float bias[kKeys];
  static_assert(kKeys % 4 == 0 && kKeys <= 128, "four a lane");

  // f(score, bias) for all scores of this lane.
  template <class F>
  __device__ __forceinline__ void for_each(Fragment<1, kKeys>& s, F f) const {
    const u32 at = shared_address(bias) + 8 * (lane_id() % 4);
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      u32 pair[2];
      ld_shared(pair, at + 32 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) f(s.x[0][n][i], __uint_as_float(pair[i % 2]));
    }
  }

  __device__ __forceinline__ void add(Fragment<1, kKeys>& s, float factor) const {
    float four[4] = {};
    if (4 * lane_id() < kKeys) ld_shared(four, shared_address(bias) + 16 * lane_id());
    for_each(s, [&](float& x, float b) { x = fmaf(x, factor, b); });
    const bool away = four[0] == neg_inf() || four[1] == neg_inf() || four[2] == neg_inf() || four[3] == neg_inf();
    if (__any_sync(kFullWarp, away)) for_each(s, [](float& x, float b) { x = b == neg_inf() ? b : x; });
  }
};

}  // namespace cuflash
