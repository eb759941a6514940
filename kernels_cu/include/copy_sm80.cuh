// The family's copies from global to shared memory: cp.async, zero-filled past `valid` bytes.
#pragma once
#include "ptx/cp_async.cuh"

namespace cuflash {

constexpr int kCopyUnroll = 16;  // rows of a thread at a time: each costs one instruction

template <int kBytes>
__device__ __forceinline__ void copy(void* smem, const void* gmem, int valid) {
  cp_async<kBytes>(smem, gmem, valid);
}
template <int kBytes>
__device__ __forceinline__ void copy(void* smem, const void* gmem) {
  cp_async<kBytes>(smem, gmem);
}
__device__ __forceinline__ void copy_commit() { cp_async_commit(); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  cp_async_wait<kPending>();
}

}  // namespace cuflash
