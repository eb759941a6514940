// Asynchronous copies from global to shared memory (sm_80). Bytes past `valid` are written as zeros and not read.
#pragma once
#include "ptx/shared.cuh"

namespace cuflash {

template <int kBytes>
__device__ __forceinline__ void cp_async(void* smem, const void* gmem, int valid) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(smem)), "l"(gmem), "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(smem)), "l"(gmem), "n"(kBytes),
                 "r"(valid)
                 : "memory");
  }
}
template <int kBytes>
__device__ __forceinline__ void cp_async(void* smem, const void* gmem) {
  static_assert(kBytes == 16, "whole tiles come in the widest copies");
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(smem)), "l"(gmem) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cuflash
