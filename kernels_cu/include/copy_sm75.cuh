// The family's copies from global to shared memory: through registers, done when the barrier that follows is passed.
#pragma once
#include "common.cuh"

namespace cuflash {

constexpr int kCopyUnroll = 2;  // rows of a thread at a time: each holds its data in registers

template <int kBytes>
struct Vector;
template <>
struct Vector<16> {
  using type = uint4;
};
template <>
struct Vector<8> {
  using type = uint2;
};
template <>
struct Vector<4> {
  using type = u32;
};

template <int kBytes>
__device__ __forceinline__ void copy(void* smem, const void* gmem, int valid) {
  using V = typename Vector<kBytes>::type;
  V x{};
  if (valid >= kBytes) {
    x = *static_cast<const V*>(gmem);
  } else {  // the last elements of a row: none past them may be read
    u16 parts[kBytes / 2] = {};
#pragma unroll
    for (int i = 0; i < kBytes / 2; ++i)
      if (2 * i < valid) parts[i] = static_cast<const u16*>(gmem)[i];
    u32 words[kBytes / 4];
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) words[i] = u32(parts[2 * i]) | u32(parts[2 * i + 1]) << 16;
    if constexpr (kBytes == 16) x = make_uint4(words[0], words[1], words[2], words[3]);
    if constexpr (kBytes == 8) x = make_uint2(words[0], words[1]);
    if constexpr (kBytes == 4) x = words[0];
  }
  *static_cast<V*>(smem) = x;
}
template <int kBytes>
__device__ __forceinline__ void copy(void* smem, const void* gmem) {
  *static_cast<typename Vector<kBytes>::type*>(smem) = *static_cast<const typename Vector<kBytes>::type*>(gmem);
}
__device__ __forceinline__ void copy_commit() {}
template <int kPending>
__device__ __forceinline__ void copy_wait() {}

}  // namespace cuflash
