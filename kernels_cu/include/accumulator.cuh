// The type that sums, scores and row statistics are held in, and its arithmetic: double for double, else float.
#pragma once
#include "common.cuh"
#include "exp2.cuh"
#include "ptx/math.cuh"

namespace cuflash {

using Accumulator = ConditionalType<kSame<Operand, double>, double, float>;

constexpr Accumulator kLog2E = Accumulator(1.4426950408889634);
constexpr Accumulator kLn2 = Accumulator(0.6931471805599453);
// 2^24 or 2^53: from here on the type has no fraction.
constexpr Accumulator kLargeExponent =
    sizeof(Accumulator) == 8 ? Accumulator(9007199254740992.) : Accumulator(16777216);

// Products and differences rounded by themselves: not contracted to an FMA, which would round otherwise elsewhere.
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double mul_rn(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double add_rn(double a, double b) { return __dadd_rn(a, b); }

__device__ __forceinline__ double lg2(double x) { return log2(x); }

// 2^x, for whole warps, over all of the type's range. Where is_far is false for all elements of a warp, `near` is the
// same in fewer instructions; `flushed` takes x < 1022 and may give 0 where the power is no normal number.
struct Exp2Float {
  static constexpr bool kHasFar = false;
  __device__ __forceinline__ explicit Exp2Float(int) {}
  static __device__ __forceinline__ bool is_far(float) { return false; }
  __device__ __forceinline__ float near(float x) const { return ex2(x); }
  __device__ __forceinline__ float flushed(float x) const { return ex2(x); }
  __device__ __forceinline__ float operator()(float x) const { return ex2(x); }
};
struct Exp2Double {
  static constexpr bool kHasFar = true;
  Exp2Table table;
  __device__ __forceinline__ explicit Exp2Double(int lane) : table(lane) {}
  static __device__ __forceinline__ bool is_far(double x) { return cuflash::is_far(x); }
  __device__ __forceinline__ double near(double x) const { return ex2_near(x, table); }
  __device__ __forceinline__ double flushed(double x) const { return ex2_flushed(x, table); }
  __device__ __forceinline__ double operator()(double x) const { return ex2(x, table); }
};
using Exp2 = ConditionalType<sizeof(Accumulator) == 8, Exp2Double, Exp2Float>;

// The larger one; `a` where b is NaN, as NaN scores show in the sum.
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return b > a ? b : a; }

// tanh with a relative error near 2^-22 everywhere: 1 - 2 / (1 + e^2x) cancels near zero, a Taylor polynomial does not.
__device__ __forceinline__ float tanh_exact(float x) {
  const float x2 = x * x;
  const float series = x * (1.f + x2 * (-1.f / 3 + x2 * (2.f / 15 + x2 * (-17.f / 315 + x2 * (62.f / 2835)))));
  const float ratio = 1.f - 2.f * rcp(1.f + ex2(2.f * float(kLog2E) * x));
  return fabsf(x) < 0.3f ? series : ratio;
}
__device__ __forceinline__ double tanh_exact(double x) { return tanh(x); }

}  // namespace cuflash
