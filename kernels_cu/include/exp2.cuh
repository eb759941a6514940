// 2^x in float64 for whole warps. DMMA shares a pipe with every other FP64 instruction, so few of those: ten, no
// compare.
//
// x = n/32 + r with |r| <= 1/64, and 2^x = 2^floor(n/32) * T * 2^r with T = 2^((n mod 32)/32). The table of T is spread
// over the lanes of a warp and a shuffle is the lookup: it takes n modulo 32 by itself, has no bank conflicts and needs
// no shared memory. The exponent goes in by one integer operation on the high word of T.
// Within 1 ulp (the worst of 20 million: 0.992): 0.478 from the rounding of T, half from that of the result, the rest
// from the polynomial. 2^0 is exactly 1. tests/test_exp2.py reads the numbers below and holds all this to mpmath.
//
// The logarithm, needed once a row, is CUDA's own log().
#pragma once
#include "common.cuh"

namespace cuflash {

// 2^(i/32), rounded to nearest.
__constant__ const double kExp2Roots[32] = {
    0x1.0000000000000p+0, 0x1.059b0d3158574p+0, 0x1.0b5586cf9890fp+0, 0x1.11301d0125b51p+0, 0x1.172b83c7d517bp+0,
    0x1.1d4873168b9aap+0, 0x1.2387a6e756238p+0, 0x1.29e9df51fdee1p+0, 0x1.306fe0a31b715p+0, 0x1.371a7373aa9cbp+0,
    0x1.3dea64c123422p+0, 0x1.44e086061892dp+0, 0x1.4bfdad5362a27p+0, 0x1.5342b569d4f82p+0, 0x1.5ab07dd485429p+0,
    0x1.6247eb03a5585p+0, 0x1.6a09e667f3bcdp+0, 0x1.71f75e8ec5f74p+0, 0x1.7a11473eb0187p+0, 0x1.82589994cce13p+0,
    0x1.8ace5422aa0dbp+0, 0x1.93737b0cdc5e5p+0, 0x1.9c49182a3f090p+0, 0x1.a5503b23e255dp+0, 0x1.ae89f995ad3adp+0,
    0x1.b7f76f2fb5e47p+0, 0x1.c199bdd85529cp+0, 0x1.cb720dcef9069p+0, 0x1.d5818dcfba487p+0, 0x1.dfc97337b9b5fp+0,
    0x1.ea4afa2a490dap+0, 0x1.f50765b6e4540p+0};

// 2^r = 1 + r (c[0] + r (c[1] + ...)): minimax in relative error on [-1/64, 1/64], within 2^-60. Rounded from the
// highest coefficient down, the lower ones fitted anew after each; the last two to the high word, all that fits into an
// instruction.
__constant__ double kExp2Coefficients[6] = {0x1.62e42fefa39efp-1, 0x1.ebfbdff82c58fp-3, 0x1.c6b08d702d43ep-5,
                                            0x1.3b2ab6fb72f34p-7, 0x1.5d887p-10,        0x1.430ap-13};

constexpr double kExp2Round = 0x1.8p+47;  // added, rounds to a multiple of 1/32 and leaves n in the low word
constexpr int kExponentOne = 1 << 20;     // in a high word: a factor of 2

// This lane's entry. Made by each lane of a warp, used by whole warps.
struct Exp2Table {
  int low, high;

  // What n << 15 brings to the exponent field beyond whole octaves, n mod 32, is taken off here.
  __device__ __forceinline__ explicit Exp2Table(int lane)
      : low(__double2loint(kExp2Roots[lane])), high(__double2hiint(kExp2Roots[lane]) - (lane << 15)) {}
};

// 2^x = scale * (1 + tail).
__device__ __forceinline__ void ex2_split(double x, const Exp2Table& table, double& scale, double& tail) {
  const double rounded = __dadd_rn(x, kExp2Round);
  const double r = __dsub_rn(x, __dsub_rn(rounded, kExp2Round));  // exact
  const int n = __double2loint(rounded);
  const int low = __shfl_sync(kFullWarp, table.low, n), high = __shfl_sync(kFullWarp, table.high, n);
  scale = __hiloint2double(high + (n << 15), low);
  tail = kExp2Coefficients[5];
#pragma unroll
  for (int i = 4; i >= 0; --i) tail = fma(tail, r, kExp2Coefficients[i]);
  tail = __dmul_rn(tail, r);
}

// Whether ex2_near does not serve: |x| >= 1022, infinite or NaN.
__device__ __forceinline__ bool is_far(double x) {
  return (__double2hiint(x) & 0x7fffffff) >= 0x408ff000;  // the high word of 1022
}

// 2^x for |x| < 1022. A NaN stays one; what becomes of other x is unspecified.
__device__ __forceinline__ double ex2_near(double x, const Exp2Table& table) {
  double scale, tail;
  ex2_split(x, table, scale, tail);
  return fma(scale, tail, scale);
}

// 2^x for any x: results may be subnormal, are 0 from -1075 down and infinite from 1024 up. A NaN must be a quiet one,
// as those that come out of arithmetic are.
template <class Table>
__device__ __forceinline__ double ex2(double x, const Table& table) {
  double scale, tail;
  ex2_split(x, table, scale, tail);
  // Where the power of two may not be a normal number, it is applied in two steps, the second being 2^-128 or 2^128.
  const int x_high = __double2hiint(x);
  const int shift = !is_far(x) ? 0 : x_high < 0 ? 128 * kExponentOne : -128 * kExponentOne;
  scale = __hiloint2double(__double2hiint(scale) + shift, __double2loint(scale));
  double y = fma(scale, tail, scale) * __hiloint2double(1023 * kExponentOne - shift, 0);
  // High words, in order: 1024, infinity; -1075, -infinity. Beyond, n may have wrapped around.
  if (x_high >= 0x40900000 && x_high <= 0x7ff00000) y = __hiloint2double(0x7ff00000, 0);
  if (u32(x_high) >= 0xc090cc00u && u32(x_high) <= 0xfff00000u) y = 0.;
  return y;
}

// 2^x for x < 1022, with 0 for 2^-1022 and below: what a weight of a sum of 1 may lose. A NaN stays one.
__device__ __forceinline__ double ex2_flushed(double x, const Exp2Table& table) {
  const double y = ex2_near(x, table);
  const u32 high = __double2hiint(x);
  return high - 0xc08ff000u <= 0xfff00000u - 0xc08ff000u ? 0. : y;  // from -1022 to -infinity: one comparison
}

}  // namespace cuflash
