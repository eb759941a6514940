// Score terms in the backward of queries for sm_90: rows are query rows, and a lane has keys in pairs. Scores are
// formed as in terms_backward_sm90.cuh. As ds alone is wanted, the slope of a softcap goes into p.
#pragma once
#include "recompute_rows_sm90.cuh"
#include "terms_backward_sm90.cuh"

namespace cuflash {

// key_bias of a block: a lane has it of two neighbours, and others get it by shuffles.
template <int kKeys>
struct BlockKeys {
  float own[2];

  // `row`: of the batch position. Of keys beyond the length, or where there are no weights, 0.
  __device__ __forceinline__ void load(const Params& params, i64 row, int key0) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int key = key0 + 2 * lane_id() + j;
      own[j] = 0;
      if (params.key_bias != nullptr && key < params.seqlen_k)
        own[j] = params.key_bias[row + key * params.key_bias_stride.row];
    }
  }

  // By whole warps.
  __device__ __forceinline__ bool any_is_absent() const {
    return __any_sync(kFullWarp, own[0] == neg_inf() || own[1] == neg_inf());
  }

  // f(score, row slot, bias) for columns by eights from the first to before the last, by whole warps.
  template <class F>
  __device__ __forceinline__ void for_each(Fragment<1, kKeys>& s, F f, int first = 0, int last = kKeys / 8) const {
#pragma unroll
    for (int n = first; n < last; ++n) {
      float bias[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) bias[j] = __shfl_sync(kFullWarp, own[j], 4 * n + lane_id() % 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) f(s.x[0][n][i], i / 2, bias[i % 2]);
    }
  }

  __device__ __forceinline__ void add(Fragment<1, kKeys>& s, float factor) const {
    for_each(s, [&](float& x, int, float bias) { x = fmaf(x, factor, bias); });
  }
  __device__ __forceinline__ void mask_absent(Fragment<1, kKeys>& s) const {
    for_each(s, [](float& x, int, float bias) { x = bias == neg_inf() ? bias : x; });
  }

  // From tanh of scores to p times the slope, which is 0 for a mask.
  __device__ __forceinline__ void tanh_to_p(Fragment<1, kKeys>& tanh, const Params& params, const OwnRows& rows) const {
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      const auto form = [&](auto of_large) {
        const auto of_score = [&](float& x, int slot, float bias) {
          x = tanh_to_probability<decltype(of_large)::value>(params, x, bias, rows.lse[slot]) *
              fma_saturated(-x, x, 1.f);
        };
        for_each(tanh, of_score, n, n + 2);
      };
      // Asked for each part anew: in one piece of code the compiler would hold too many weights at once.
      int chosen = rows.any_is_large;
      asm volatile("" : "+r"(chosen));
      if (chosen) {
        form(Flag<true>{});
      } else {
        form(Flag<false>{});
      }
    }
  }
};

}  // namespace cuflash
