// p and ds from products, transposed: columns are query rows, of which shared memory holds what a row has of its own.
#pragma once
#include "fragment.cuh"
#include "params.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// What the columns of a lane have of their own, by pairs, each read when it is wanted: from shared memory, or from
// global memory where that is seldom.
template <int kCols>
struct LaneColumns {
  u32 at;

  __device__ __forceinline__ explicit LaneColumns(const float* of_rows, int lane = lane_id())
      : at(shared_address(of_rows) + 8 * (lane % 4)) {}
  __device__ __forceinline__ void pair(float (&x)[2], int n) const { ld_shared(x, at + 32 * n); }
};
template <int kCols>
struct FarLaneColumns {
  const float* at;

  __device__ __forceinline__ explicit FarLaneColumns(const float* of_rows) : at(of_rows + 2 * (lane_id() % 4)) {}
  __device__ __forceinline__ void pair(float (&x)[2], int n) const { x[0] = at[8 * n], x[1] = at[8 * n + 1]; }
};
// The same, read at once and kept, where there are registers: beside products shared memory answers late.
template <int kCols>
struct KeptColumns {
  float x[kCols / 8][2];

  __device__ __forceinline__ explicit KeptColumns(const float* of_rows) {
    const LaneColumns<kCols> columns(of_rows);
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) columns.pair(x[n], n);
  }
  __device__ __forceinline__ void pair(float (&y)[2], int n) const { y[0] = x[n][0], y[1] = x[n][1]; }
};

// f(element of the fragment, element of another one of its shape, what the element's column has of its own, row slot).
template <int kCols, class Columns, class F>
__device__ __forceinline__ void for_each_of_rows(Fragment<1, kCols>& f, Fragment<1, kCols>& other,
                                                 const Columns& of_rows, F function) {
#pragma unroll
  for (int n = 0; n < kCols / 8; ++n) {
    float pair[2];
    of_rows.pair(pair, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) function(f.x[0][n][i], other.x[0][n][i], pair[i % 2], i / 2);
  }
}

// What is kept of lse: its exponent of 2, or, where that has no fraction, twice lse itself, which is as large. +inf
// stays what it is; it also stands for rows beyond the length and rows without keys, whose p is 0.
__device__ __forceinline__ float kept_lse(float lse) {
  const float exponent = lse * kLog2E, twice = 2 * lse;
  if (!(fabsf(exponent) >= kLargeExponent)) return exponent;
  const bool overflows = fabsf(twice) == pos_inf() && fabsf(lse) < pos_inf();
  return overflows ? copysignf(__int_as_float(0x7f7fffff), lse) : twice;
}
__device__ __forceinline__ bool is_large(float kept) { return fabsf(kept) >= kLargeExponent && kept < pos_inf(); }

// Whether any of so many rows is, by whole warps: each lane looks at some of them.
template <int kCols>
__device__ __forceinline__ bool any_is_large(const float* lse) {
  bool large = false;
#pragma unroll
  for (int i = 0; i < kCols / 32; ++i) {
    float of_row;
    ld_shared(of_row, shared_address(lse + 32 * i + lane_id()));
    large |= is_large(of_row);
  }
  return __any_sync(kFullWarp, large);
}

// Query rows beyond the length, which would have no weight but for an infinite key: their q is 0.
template <int kCols>
__device__ __forceinline__ void mask_beyond_length(Fragment<1, kCols>& s, const Params& params, int row0) {
  const int limit = params.seqlen_q - row0 - 2 * (lane_id() % 4);
  s.for_each_lane_column([&](float& x, int, int col) { x = col < limit ? x : neg_inf(); });
}

// p = 2^(s c - lse). But of large lse the difference is taken first, in natural units, of products rounded as the
// forward rounded them (recompute.cuh).
template <bool kLarge>
__device__ __forceinline__ float exponent(const Params& params, float s, float lse) {
  if constexpr (!kLarge) return fmaf(s, params.exponent_scale, -lse);
  const float exponent =
      is_large(lse) ? add_rn(mul_rn(s, params.lse_scale), -lse / 2) * kLog2E : fmaf(s, params.exponent_scale, -lse);
  return exponent > 0 ? 0 : exponent;
}
template <bool kLarge>
__device__ __forceinline__ float probability(const Params& params, float s, float lse) {
  return ex2(exponent<kLarge>(params, s, lse));
}
template <bool kLarge, int kCols, class Columns>
__device__ __forceinline__ void scores_to_exponents(Fragment<1, kCols>& s, const Params& params, const Columns& lse) {
  for_each_of_rows(s, s, lse, [&](float& x, float&, float of_row, int) { x = exponent<kLarge>(params, x, of_row); });
}
// Of columns [kBegin, kEnd).
template <int kBegin, int kEnd, int kCols>
__device__ __forceinline__ void exponents_to_p(Fragment<1, kCols>& s) {
#pragma unroll
  for (int n = kBegin / 8; n < kEnd / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s.x[0][n][i] = ex2(s.x[0][n][i]);
}

template <bool kLarge, int kCols, class Columns>
__device__ __forceinline__ void scores_to_p(Fragment<1, kCols>& s, const Params& params, const Columns& lse) {
  scores_to_exponents<kLarge>(s, params, lse);
  exponents_to_p<0, kCols>(s);
}

// ds / scale = p (dp - delta).
template <int kCols, class Columns>
__device__ __forceinline__ void dp_to_ds(Fragment<1, kCols>& dp, Fragment<1, kCols>& p, const Columns& delta) {
  for_each_of_rows(dp, p, delta, [](float& x, float& p_of, float of_row, int) { x = p_of * (x - of_row); });
}

}  // namespace cuflash
