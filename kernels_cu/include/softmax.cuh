// Online softmax of one warp's rows, base 2.
//
// The reference mc = fl(row_max * c) is used alike in p = 2^(s*c - mc) (one FMA), in the rescale and in lse: any common
// reference is exact. From |mc| = 2^24 on, the rounding of the product no longer cancels in the FMA (its residue can be
// thousands), so such rows subtract first: p = 2^((s - row_max) * c), reference row_max * c unrounded.
// A mask is -inf; the reference of a row that has seen no key is 0.
#pragma once
#include "common.cuh"
#include "fragment.cuh"
#include "ptx/math.cuh"

namespace cuflash {

// Negated so that NaN counts as large.
__device__ __forceinline__ bool is_large(float exponent) { return !(fabsf(exponent) < kLargeExponent); }

template <int kMTiles>
struct OnlineSoftmax {
  static constexpr int kRows = 2 * kMTiles;
  float row_max[kRows];  // over the whole row: the quad agrees
  float row_sum[kRows];  // over this lane's columns: finish() adds the quad
  float c;               // from a score to an exponent of 2

  __device__ __forceinline__ explicit OnlineSoftmax(float exponent_scale) : c(exponent_scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_max[r] = neg_inf(), row_sum[r] = 0.f;
  }

  static __device__ __forceinline__ float reference(float max) { return max == neg_inf() ? 0.f : max; }

  // Turns scores into p and leaves in `rescale` the factor that earlier sums of the row take.
  template <int kCols>
  __device__ __forceinline__ void update(Fragment<kMTiles, kCols>& s, float (&rescale)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float old_max = row_max[r];
      float max = old_max;
      s.for_each_in_row(r, [&](float& x) { max = fmaxf(max, x); });
      row_max[r] = max = quad_max(max);
      const float m = reference(max), old_m = reference(old_max), old_mc = __fmul_rn(old_m, c);
      float mc = __fmul_rn(m, c), exponent = old_mc - mc;  // not contracted: the references as they are used
      const bool large = is_large(mc), old_large = is_large(old_mc);
      if (__any_sync(kFullWarp, large || old_large)) {
        // Each reference as it was used: rounded below 2^24, exact above.
        exponent = large       ? (old_large ? (old_m - m) * c : fmaf(-m, c, old_mc))
                   : old_large ? fmaf(old_m, c, -mc)
                               : exponent;
        if (large) {  // the maximum leaves the scores before the FMA does, whose reference then is 0
          s.for_each_in_row(r, [&](float& x) { x -= m; });
          mc = 0.f;
        }
      }
      // A row without keys so far has sums of 0: any finite factor serves, and 2^(0 - mc) may not be finite.
      rescale[r] = old_max == neg_inf() ? 0.f : ex2(exponent);
      float sum = 0.f;
      s.for_each_in_row(r, [&](float& x) {
        x = ex2(fmaf(x, c, -mc));
        sum += x;
      });
      row_sum[r] = row_sum[r] * rescale[r] + sum;
    }
  }

  // The factor that makes o of row slot r an average, and the row's lse in natural units.
  __device__ __forceinline__ void finish(int r, float lse_scale, float& o_scale, float& lse) const {
    const float sum = quad_sum(row_sum[r]), m = reference(row_max[r]), mc = __fmul_rn(m, c);
    const bool empty = row_max[r] == neg_inf() && sum == 0.f;  // NaN scores leave a NaN sum, not an empty row
    o_scale = empty ? 0.f : 1.f / sum;
    if (empty || row_max[r] == pos_inf()) {
      lse = row_max[r];
    } else {
      lse = is_large(mc) ? __fadd_rn(__fmul_rn(m, lse_scale), lg2(sum) * kLn2) : (mc + lg2(sum)) * kLn2;
    }
  }
};

}  // namespace cuflash
