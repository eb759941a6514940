// Score terms in the backward of sm_90, on transposed scores: a lane has two keys, whose weights it holds in registers.
//
// Scores are formed as the forward forms them (terms_sm90.cuh): fma(s, scale, bias) with key_bias alone; with softcap
// tanh(x), which is what is kept of a score, and with both fma(tanh(x), cap, bias). From tanh to p and ds is one pass:
// there are registers for tanh beside dp, not for p and the slope. A masked score is -inf, tanh likewise.
//
// Kernels for some of the gradients serve any terms: whether there is a softcap is asked at run time (is_capped).
#pragma once
#include "gemm_sm90.cuh"
#include "locate.cuh"
#include "ptx/math.cuh"
#include "recompute_sm90.cuh"
#include "terms_sm90.cuh"

namespace cuflash {

__device__ __forceinline__ bool is_capped(const Params& params) { return kSoftcap && params.softcap != 0; }

// Sums of ds for the gradient of key_bias, of the 16 keys of each consumer warp, which no other touches.
struct KeySums {
  float of_warp[kTile.block_n / 16][16];
};

// key_bias of a lane's two keys, and the sums of its warp.
struct LaneKeys {
  // Of the warps that sum, which are the last.
  static constexpr int kFirstThread = 32 * (kTile.warps - kTile.block_n / 16);
  float bias[2];
  KeySums& sums;

  __device__ __forceinline__ explicit LaneKeys(KeySums& sums) : sums(sums) {}

  // f(row slot, sum, key of the warp's), by the lane that has the sum.
  template <class F>
  __device__ __forceinline__ void for_each_sum(F f) const {
    int thread = threadIdx.x - kFirstThread;
    asm volatile("" : "+r"(thread));  // where sums are is worked out each time, not kept
    if (thread % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = thread % 32 / 4 + 8 * r;
      f(r, sums.of_warp[thread / 32][key], key);
    }
  }

  // At a batch position.
  __device__ __forceinline__ void begin(const Params& params, const BatchIndex& batch, int key0) {
    load(params, batch, key0);
    for_each_sum([&](int, float& sum, int) { sum = 0; });
  }
  // Of keys beyond the length, or where there are no weights, 0.
  __device__ __forceinline__ void load(const Params& params, const BatchIndex& batch, int key0) {
    asm volatile("" : "+r"(key0));
    Fragment<1, 8>::for_each_row([&](int r, int row) {
      bias[r] = 0;
      if (params.key_bias != nullptr && key0 + row < params.seqlen_k)
        bias[r] = params.key_bias[offset(params.key_bias_stride, batch) + (key0 + row) * params.key_bias_stride.row];
    });
  }

  __device__ __forceinline__ bool is_absent(int r) const { return bias[r] == neg_inf(); }
  // By whole warps.
  __device__ __forceinline__ bool any_is_absent() const { return __any_sync(kFullWarp, is_absent(0) || is_absent(1)); }

  template <int kCols>
  __device__ __forceinline__ void add(Fragment<1, kCols>& s, float factor) const {
    s.for_each_lane_column([&](float& x, int r, int) { x = fmaf(x, factor, bias[r]); });
  }

  // What a lane has summed of a block, by whole warps: summed by itself, as one long chain of additions would drift.
  __device__ __forceinline__ void add_gradient(float (&of_block)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) of_block[r] = quad_sum(of_block[r]);
    for_each_sum([&](int r, float& sum, int) { sum += of_block[r]; });
  }

  // The gradient at a batch position: to where sums over positions are made, or to its place.
  __device__ __forceinline__ void store_gradient(const Params& params, const BatchIndex& batch, int key0) const {
    if (params.dkey_bias == nullptr) return;
    float* gmem;
    i64 step = 1;
    if (params.partials != nullptr) {
      gmem = params.partials + position_number(params, batch) * params.seqlen_k;
    } else {
      gmem = base<float>(params.dkey_bias, params.dkey_bias_stride, batch);
      step = params.dkey_bias_stride.row;
    }
    for_each_sum([&](int, float sum, int key) {
      if (key0 + key < params.seqlen_k) gmem[(key0 + key) * step] = sum;
    });
  }
};

// ds / scale = p (dp - delta), and its sums.
template <int kCols, class Columns>
__device__ __forceinline__ void dp_to_ds(Fragment<1, kCols>& dp, Fragment<1, kCols>& p, const Columns& delta,
                                         LaneKeys& keys) {
  float sum[2] = {};
  for_each_of_rows(dp, p, delta, [&](float& x, float& p_of, float of_row, int r) {
    x = p_of * (x - of_row);
    sum[r] += x;
  });
  keys.add_gradient(sum);
}

// p of tanh of a score. A mask holds whatever the weight is.
template <bool kLarge>
__device__ __forceinline__ float tanh_to_probability(const Params& params, float tanh, float bias, float lse) {
  float score = tanh;
  if constexpr (kKeyBias) score = tanh == neg_inf() ? tanh : fmaf(tanh, params.softcap, bias);
  return probability<kLarge>(params, score, lse);
}

// From tanh of scores to p as the left operand of products. `large`: as of scores.
template <int kCols>
__device__ __forceinline__ void tanh_to_p(const Fragment<1, kCols>& tanh, const Params& params, const float* lse,
                                          bool large, const LaneKeys& keys, OperandA<kCols>& p) {
  const LaneColumns<kCols> of_lse(lse);
  const auto form = [&](auto of_large) {
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      float lse_of[2];
      of_lse.pair(lse_of, n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float p_of[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
          p_of[j] =
              tanh_to_probability<decltype(of_large)::value>(params, tanh.x[0][n][2 * r + j], keys.bias[r], lse_of[j]);
        p.set(2 * n + r, p_of[0], p_of[1]);
      }
    }
  };
  if (large) {
    form(Flag<true>{});
  } else {
    form(Flag<false>{});
  }
}

// From tanh of scores to ds / scale as the left operand of products: load_tanh(registers, number) brings tanh of 8
// columns.
template <int kCols, class F>
__device__ __forceinline__ void tanh_to_ds(F load_tanh, const Fragment<1, kCols>& dp, const Params& params,
                                           const float* lse, const float* delta, bool large, LaneKeys& keys,
                                           OperandA<kCols>& ds) {
  float sum[2] = {};
  const LaneColumns<kCols> of_lse(lse), of_delta(delta);
  const auto form = [&](auto of_large) {
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      float tanh[4], lse_of[2], delta_of[2];
      load_tanh(tanh, n);
      of_lse.pair(lse_of, n);
      of_delta.pair(delta_of, n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float ds_of[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float t = tanh[2 * r + j];
          const float p = tanh_to_probability<decltype(of_large)::value>(params, t, keys.bias[r], lse_of[j]);
          const float before_cap = p * (dp.x[0][n][2 * r + j] - delta_of[j]);
          sum[r] += before_cap;
          ds_of[j] = before_cap * fma_saturated(-t, t, 1.f);  // 0 for a mask
        }
        ds.set(2 * n + r, ds_of[0], ds_of[1]);
      }
    }
  };
  if (large) {
    form(Flag<true>{});
  } else {
    form(Flag<false>{});
  }
  keys.add_gradient(sum);
}

// From tanh of scores to p and to ds / scale, both as the left operands of products. `large`: as of scores.
template <int kCols>
__device__ __forceinline__ void tanh_to_p_and_ds(const Fragment<1, kCols>& tanh, const Fragment<1, kCols>& dp,
                                                 const Params& params, const float* lse, const float* delta, bool large,
                                                 LaneKeys& keys, OperandA<kCols>& p, OperandA<kCols>& ds) {
  constexpr int kPart = 32;
  static_assert(kCols % kPart == 0);
  float sum[2] = {};
  const LaneColumns<kCols> of_lse(lse), of_delta(delta);
#pragma unroll
  for (int first = 0; first < kCols / 8; first += kPart / 8) {
    const auto form = [&](auto of_large) {
#pragma unroll
      for (int n = first; n < first + kPart / 8; ++n) {
        float lse_of[2], delta_of[2];
        of_lse.pair(lse_of, n);
        of_delta.pair(delta_of, n);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float p_of[2], ds_of[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float t = tanh.x[0][n][2 * r + j];
            p_of[j] = tanh_to_probability<decltype(of_large)::value>(params, t, keys.bias[r], lse_of[j]);
            const float before_cap = p_of[j] * (dp.x[0][n][2 * r + j] - delta_of[j]);
            if constexpr (kKeyBias) sum[r] += before_cap;
            ds_of[j] = before_cap * fma_saturated(-t, t, 1.f);  // 0 for a mask
          }
          p.set(2 * n + r, p_of[0], p_of[1]);
          ds.set(2 * n + r, ds_of[0], ds_of[1]);
        }
      }
    };
    // Asked for each part anew: in one piece of code the compiler would hold too much at once.
    int chosen = large;
    asm volatile("" : "+r"(chosen));
    if (chosen) {
      form(Flag<true>{});
    } else {
      form(Flag<false>{});
    }
  }
  if constexpr (kKeyBias) keys.add_gradient(sum);
}

}  // namespace cuflash
