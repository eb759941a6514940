// Score terms of a warp's scores, in as few instructions as they take: softcap, key_bias from shared memory.
//
// Formed from products are, before the masks: fma(s, scale, bias) with key_bias alone; with softcap alone tanh(x), the
// cap being a factor of the exponent as the scale is where there are no terms; with both fma(tanh(x), cap, bias). Where
// a block is bet on (softmax.cuh) no score is formed: its exponent comes from the product at once.
#pragma once
#include "fragment.cuh"
#include "params.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// tanh(x) = x q(x^2 - limit^2) for |x| < limit: minimax in relative error. From the limit on, the argument of q is not
// negative, which is how a score beyond it shows.
struct LowSeries {  // within 2^-22.7
  static constexpr u32 kReach = 0;
  static constexpr int kTerms = 3;
  static constexpr double kLimit = 0.21;
  static __device__ constexpr double term(int i) {
    const double q[kTerms] = {0.98555489920498076, -0.3218244055810663, 0.1298347340188919};
    return q[i];
  }
};
struct HighSeries {  // within 2^-23.1
  static constexpr u32 kReach = 1;
  static constexpr int kTerms = 6;
  static constexpr double kLimit = 0.85;
  static __device__ constexpr double term(int i) {
    const double q[kTerms] = {0.81302281624669799,   -0.20111602831829821, 0.061652980848088391,
                              -0.020115618850681897, 0.004080189106746538, -0.0040081044362099842};
    return q[i];
  }
};

struct NoSeries {
  static constexpr u32 kReach = 2;
};

// tanh of score * scale / cap. Which series serves raw scores is what the last block that has been formed showed: of
// the whole warp, so that there are no choices element by element.
class Tangent {
  float scale, factor;
  u32 needed = NoSeries::kReach;

  // The coefficients of raw scores hold powers of the factor: whether the first and the last, and so all of them, are
  // far from the ends of float32. LowSeries has its inverse powers, the fifth among them.
  template <class Series>
  __device__ __forceinline__ bool has_coefficients() const {
    const auto is_within = [](float x, float most) { return fabsf(x) > 1 / most && fabsf(x) < most; };
    float power = 1, last = scale;
#pragma unroll
    for (int i = 1; i < Series::kTerms; ++i) power *= factor * factor, last *= factor * factor;
    return is_within(scale, 1e34f) && is_within(last, 1e34f) && (!kSame<Series, LowSeries> || is_within(power, 1e30f));
  }

  template <class Series>
  static __device__ __forceinline__ float of_series(float x) {
    const float w = fmaf(x, x, float(-Series::kLimit * Series::kLimit));
    float q = float(Series::term(Series::kTerms - 1));
#pragma unroll
    for (int i = Series::kTerms - 2; i >= 0; --i) q = fmaf(q, w, float(Series::term(i)));
    return x * q;
  }
  // 1 - 2 / (1 + e^2x) cancels near zero: chosen element by element, within 2^-21.
  static __device__ __forceinline__ float of_any(float x) {
    const float ratio = fmaf(-2.f, rcp(1.f + ex2(x * float(2 * 1.4426950408889634))), 1.f);
    return fabsf(x) < float(HighSeries::kLimit) ? of_series<HighSeries>(x) : ratio;
  }

 public:
  __device__ __forceinline__ explicit Tangent(const Params& params)
      : scale(params.scale), factor(params.scale / params.softcap) {}

  // That of the series.
  __device__ __forceinline__ u32 reach() const { return needed; }

  // Forms scores. kRare: as they are not the rule, LowSeries is left out, to save code; likewise where the scores are
  // to be `those_of_rare`, bit by bit. The warp chooses once for every kPart columns: each part is a piece of code of
  // its own, or the compiler would hold all scores twice.
  template <bool kRare, int kPart, int kCols>
  __device__ __forceinline__ void apply(Fragment<1, kCols>& s, bool those_of_rare = false) {
    static_assert(kPart % 8 == 0 && kCols % kPart == 0);
    bool all_low = true, all_high = true;
#pragma unroll
    for (int first = 0; first < kCols / 8; first += kPart / 8) {
      const auto for_each = [&](auto f) {
#pragma unroll
        for (int n = first; n < first + kPart / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) f(s.x[0][n][i]);
      };
      float most = 0;
      for_each([&](float& x) {
        x *= factor;
        most = fmaxf(most, fabsf(x));
      });
      const bool is_low = !__any_sync(kFullWarp, those_of_rare || most >= float(LowSeries::kLimit));
      const bool is_high = !__any_sync(kFullWarp, most >= float(HighSeries::kLimit));
      all_low &= is_low, all_high &= is_high;
      if (!kRare && is_low) {
        for_each([](float& x) { x = of_series<LowSeries>(x); });
      } else if (is_high) {
        for_each([](float& x) { x = of_series<HighSeries>(x); });
      } else {
        for_each([](float& x) { x = of_any(x); });
      }
    }
    needed = all_low && has_coefficients<LowSeries>()     ? LowSeries::kReach
             : all_high && has_coefficients<HighSeries>() ? HighSeries::kReach
                                                          : NoSeries::kReach;
  }

  // From a raw score to its exponent of 2, while all of them are within the limit: the coefficients hold every factor.
  template <class Series>
  class Exponents {
    float limit, q[Series::kTerms];
    u32 signs = 0x80000000u;

   public:
    __device__ __forceinline__ explicit Exponents(const Tangent& tangent) {
      float f2 = tangent.factor * tangent.factor;
      asm volatile("" : "+f"(f2));  // made for each block, not held in registers over all
      limit = float(Series::kLimit * Series::kLimit) * rcp(f2);
      float power = tangent.scale;
#pragma unroll
      for (int i = 0; i < Series::kTerms; ++i, power *= f2) q[i] = power * float(Series::term(i) * 1.4426950408889634);
    }
    // That of x, less a reference.
    __device__ __forceinline__ float of(float x, float minus_reference) {
      const float w = fmaf(x, x, -limit);
      signs &= __float_as_uint(w);
      float y = q[Series::kTerms - 1];
#pragma unroll
      for (int i = Series::kTerms - 2; i >= 0; --i) y = fmaf(y, w, q[i]);
      return fmaf(x, y, minus_reference);
    }
    // Whether a score of this lane was beyond the limit, or none.
    __device__ __forceinline__ bool lost() const { return int(signs) >= 0; }
  };
};

// Three terms as x factor ((x^2 + shift)^2 + offset): by Horner's rule each multiply-add has one more register to read,
// which is what it waits for beside running products. x^2 + shift is negative within the limit, and its bits are the
// less the nearer to the limit, and less yet beyond.
template <>
class Tangent::Exponents<LowSeries> {
  static constexpr double kLog2E = 1.4426950408889634;
  static constexpr double kSquare = LowSeries::kLimit * LowSeries::kLimit;
  static constexpr double kAtLimit = LowSeries::term(1) / (2 * LowSeries::term(2));  // x^2 + shift there
  static constexpr double kSlope = LowSeries::term(0) - kSquare * (LowSeries::term(1) - kSquare * LowSeries::term(2));
  float shift, offset, factor, at_limit;
  u32 least = 0xffffffffu;

 public:
  __device__ __forceinline__ explicit Exponents(const Tangent& tangent) {
    float f2 = tangent.factor * tangent.factor;
    asm volatile("" : "+f"(f2));  // made for each block, not held in registers over all
    const float inverse = rcp(f2);
    shift = float(kAtLimit - kSquare) * inverse;
    at_limit = float(kAtLimit) * inverse;
    factor = tangent.scale * f2 * f2 * float(LowSeries::term(2) * kLog2E);
    // From the slope at 0, which is right so whatever the others were rounded to.
    const float slope = tangent.scale * float(kSlope * kLog2E), over_factor = rcp(factor);
    const float quotient = slope * over_factor;
    offset = fmaf(-shift, shift, fmaf(fmaf(-quotient, factor, slope), over_factor, quotient));
  }
  __device__ __forceinline__ float of(float x, float minus_reference) {
    const float u = fmaf(x, x, shift);
    least = min_of(least, __float_as_uint(u));
    return fmaf(x * fmaf(u, u, offset), factor, minus_reference);
  }
  __device__ __forceinline__ bool lost() const { return least < __float_as_uint(at_limit); }
};

template <>
class Tangent::Exponents<NoSeries> {
 public:
  __device__ __forceinline__ explicit Exponents(const Tangent&) {}
};

// Which series the warps of a warpgroup need. All of them bet on the furthest, since products are waited for within a
// bet, which has to be the same instruction for the four. Of two sets one is read after the barrier that follows its
// writing, while the other is written.
struct SeriesOfWarps {
  alignas(16) u32 reach[2][4];

  __device__ __forceinline__ void write(int set, u32 of_warp) {
    if (lane_id() == 0) st_shared(shared_address(&reach[set][warp_id() % 4]), of_warp);
  }
  __device__ __forceinline__ u32 furthest(int set) const {
    u32 x[4];
    ld_shared(x, shared_address(reach[set]));
    const u32 most = max_of(max_of(x[0], x[1]), max_of(x[2], x[3]));
    // By votes, as the compiler is to see that lanes do not part.
    return __any_sync(kFullWarp, most == NoSeries::kReach)     ? NoSeries::kReach
           : __any_sync(kFullWarp, most == HighSeries::kReach) ? HighSeries::kReach
                                                               : LowSeries::kReach;
  }
};

// The weights of a block's keys. One of -inf takes its key away whatever the score, where the FMA is right for finite
// scores alone: where scores are formed, the warp looks for one once a block. A bet does not: an FMA that is wrong is
// NaN, which loses it.
template <int kKeys>
struct BlockBias {
  alignas(16) float bias[kKeys];
  static_assert(kKeys % 4 == 0 && kKeys <= 128, "four a lane");

  // Of the columns of this lane's scores, in their order.
  using OfLane = float[kKeys / 4];
  __device__ __forceinline__ void load(OfLane& of_lane) const {
    const u32 at = shared_address(bias) + 8 * (lane_id() % 4);
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      u32 pair[2];
      ld_shared(pair, at + 32 * n);
#pragma unroll
      for (int j = 0; j < 2; ++j) of_lane[2 * n + j] = __uint_as_float(pair[j]);
    }
  }
  // f(score, bias) for all scores of this lane.
  template <class F>
  __device__ __forceinline__ void for_each(Fragment<1, kKeys>& s, F f) const {
    OfLane of_lane;
    load(of_lane);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) f(s.x[0][i / 4][i % 4], of_lane[i / 4 * 2 + i % 2]);
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
