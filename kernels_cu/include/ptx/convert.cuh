// Conversions between float and the 16-bit types, and to TF32; round to nearest even unless it says otherwise.
#pragma once
#include "common.cuh"

namespace cuflash {

__device__ __forceinline__ float to_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float to_float(BFloat16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ double to_float(double x) { return x; }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <class T>
__device__ __forceinline__ T from_float(double x) {
  return x;
}
template <>
__device__ __forceinline__ Half from_float<Half>(float x) {
  Half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  BFloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

// A float, as bits, rounded to the leading 11 bits, which are what tensor cores take of it (sm_80). NaN stays NaN. From
// sm_90 on it is one instruction. Before, cvt has .rna alone, for which ptxas writes three, the last of which clears
// what tensor cores ignore anyway: here are the other two. Their ties go away from zero.
__device__ __forceinline__ u32 to_tf32(u32 x) {
  if constexpr (kTarget >= 90) {
    u32 y;
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
    return y;
  } else {
    return fabsf(__uint_as_float(x)) < pos_inf() ? x + 0x1000u : x;  // the largest NaN would become zero
  }
}

// Two at once (sm_80): `low` to the lower half.
__device__ __forceinline__ u32 cvt_x2(float low, float high, Half) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ u32 cvt_x2(float low, float high, BFloat16) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ void to_floats(float& low, float& high, u32 x, Half) {
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(low), "=f"(high)
      : "r"(x));
}

}  // namespace cuflash
