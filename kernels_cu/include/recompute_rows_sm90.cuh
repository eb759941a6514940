// p and ds from products: rows are query rows, two of a lane, which holds in registers what they have of their own.
#pragma once
#include "recompute_sm90.cuh"

namespace cuflash {

// Of a lane's two rows.
struct OwnRows {
  float lse[2], delta[2];  // lse as kept_lse
  bool any_is_large;       // of the warp's

  // From row vectors in shared memory, of the rows of the warpgroup.
  __device__ __forceinline__ void load(const float* lse_smem, const float* delta_smem) {
    const int row0 = warp_id() % 4 * 16 + lane_id() / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ld_shared(lse[h], shared_address(lse_smem + row0 + 8 * h));
      ld_shared(delta[h], shared_address(delta_smem + row0 + 8 * h));
    }
    any_is_large = __any_sync(kFullWarp, is_large(lse[0]) || is_large(lse[1]));
  }

  // p = 2^(s c - lse), of large lse as in recompute_sm90.cuh.
  template <int kCols>
  __device__ __forceinline__ void scores_to_p(Fragment<1, kCols>& s, const Params& params) const {
    if (any_is_large) {
      s.for_each([&](float& x, int slot, int, int) { x = probability<true>(params, x, lse[slot]); });
    } else {
      s.for_each([&](float& x, int slot, int, int) { x = probability<false>(params, x, lse[slot]); });
    }
  }

  // ds / scale = p (dp - delta).
  template <int kCols>
  __device__ __forceinline__ void dp_to_ds(Fragment<1, kCols>& dp, Fragment<1, kCols>& p) const {
    dp.for_each_with(p, [&](float& x, float& p_of, int slot, int, int) { x = p_of * (x - delta[slot]); });
  }
};

}  // namespace cuflash
