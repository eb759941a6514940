// Key tiles for few features: K and V feature by feature, in the accumulation dtype. A lane then reads neighbouring
// keys of a feature in one 16-byte load without bank conflicts, and inputs of any strides take the same code: elements
// are copied one by one. The including kernel chose the family's copy().
#pragma once
#include "accumulator.cuh"
#include "bases.cuh"
#include "fragment.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// A step is what a warp reads with one load of a feature: 16 bytes of neighbouring keys for each lane.
constexpr int kLaneKeys = 16 / int(sizeof(Accumulator)), kStepKeys = 32 * kLaneKeys, kStepBytes = 32 * 16;

// Features past the caller's head_dim or value_dim are zero from the start and never written.
template <int kFeatures, int kKeys>
struct FeatureTile {
  alignas(16) Accumulator k[kFeatures][kKeys];
  alignas(16) Accumulator v[kFeatures][kKeys];
  alignas(16) Accumulator key_bias[kKeys];

  // In bytes: from one feature to the next, and where the arrays begin.
  static constexpr int kPitch = kKeys * int(sizeof(Accumulator));
  static constexpr int kK = 0, kV = kFeatures * kPitch, kKeyBias = 2 * kFeatures * kPitch;

  // Where this lane's keys of a step are, in the first feature.
  __device__ __forceinline__ u32 address(int step) const {
    return shared_address(this) + step * kStepBytes + 16 * lane_id();
  }
};

template <class T>
__device__ __forceinline__ void copy_element(Accumulator& smem, const T* gmem, bool exists) {
  if constexpr (kSame<T, Accumulator>) {
    copy<int(sizeof(T))>(&smem, gmem, exists ? int(sizeof(T)) : 0);
  } else {
    smem = exists ? to_float(*gmem) : 0;  // no asynchronous copy converts
  }
}

// Every kThreads-th key from `key` on of kKeys, all of which exist (kWhole) or some of which do: zeros for the others.
// kAdjacent: features lie side by side.
template <int kThreads, bool kWhole, bool kAdjacent, int kFeatures, int kKeys>
__device__ __forceinline__ void load_keys(const Params& params, const volatile Bases& bases, int key,
                                          FeatureTile<kFeatures, kKeys>& smem) {
  static_assert(kKeys % kThreads == 0, "each thread copies as many keys");
  const Operand *k_gmem = bases.k, *v_gmem = bases.v;
  const Accumulator* key_bias_gmem = bases.key_bias;
  const i64 k_col = kAdjacent ? 1 : params.k_stride.col, v_col = kAdjacent ? 1 : params.v_stride.col;
  const Operand *k_next = k_gmem + key * params.k_stride.row, *v_next = v_gmem + key * params.v_stride.row;
#pragma unroll
  for (int j = 0; j < kKeys; j += kThreads) {
    const int at = threadIdx.x + j;
    const bool exists = kWhole || key + j < params.seqlen_k;
    // Where nothing is read, the address is still named: that of an element that exists.
    const Operand *k = exists ? k_next : k_gmem, *v = exists ? v_next : v_gmem;
#pragma unroll
    for (int f = 0; f < kFeatures; ++f)
      if (f < params.head_dim) copy_element(smem.k[f][at], k + f * k_col, exists);
#pragma unroll
    for (int f = 0; f < kFeatures; ++f)
      if (f < params.value_dim) copy_element(smem.v[f][at], v + f * v_col, exists);
    if (key_bias_gmem != nullptr)
      copy_element(smem.key_bias[at], key_bias_gmem + (exists ? (key + j) * params.key_bias_stride.row : 0), exists);
    k_next += kThreads * params.k_stride.row, v_next += kThreads * params.v_stride.row;
  }
}

// The tile of the keys from key0 on, by all threads of the CTA.
template <int kThreads, int kFeatures, int kKeys>
__device__ __forceinline__ void load_key_tile(const Params& params, const volatile Bases& bases, int key0,
                                              FeatureTile<kFeatures, kKeys>& smem) {
  const bool whole = key0 + kKeys <= params.seqlen_k, adjacent = params.k_stride.col == 1 && params.v_stride.col == 1;
  if (whole && adjacent) {
    load_keys<kThreads, true, true>(params, bases, key0 + threadIdx.x, smem);
  } else {
    load_keys<kThreads, false, false>(params, bases, key0 + threadIdx.x, smem);
  }
}

}  // namespace cuflash
