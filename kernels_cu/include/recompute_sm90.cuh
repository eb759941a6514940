// p and ds from products, transposed: columns are query rows, of which shared memory holds what a row has of its own.
#pragma once
#include "fragment.cuh"
#include "params.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// f(element of the fragment, element of another one of its shape, what the element's column has of `of_rows`).
template <int kCols, class F>
__device__ __forceinline__ void for_each_of_rows(Fragment<1, kCols>& f, Fragment<1, kCols>& other, const float* of_rows,
                                                 F function) {
  const u32 at = shared_address(of_rows) + 8 * (lane_id() % 4);
#pragma unroll
  for (int n = 0; n < kCols / 8; ++n) {
    u32 pair[2];
    ld_shared(pair, at + 32 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) function(f.x[0][n][i], other.x[0][n][i], __uint_as_float(pair[i % 2]));
  }
}

// p = 2^(s c - lse), of lse as an exponent of 2: +inf for rows beyond the length and rows without keys, whose p is 0.
template <int kCols>
__device__ __forceinline__ void scores_to_p(Fragment<1, kCols>& s, const Params& params, const float* lse) {
  for_each_of_rows(s, s, lse, [&](float& x, float&, float of_row) { x = ex2(fmaf(x, params.exponent_scale, -of_row)); });
}

// ds / scale = p (dp - delta).
template <int kCols>
__device__ __forceinline__ void dp_to_ds(Fragment<1, kCols>& dp, Fragment<1, kCols>& p, const float* delta) {
  for_each_of_rows(dp, p, delta, [](float& x, float& p_of, float of_row) { x = p_of * (x - of_row); });
}

}  // namespace cuflash
