// Barriers in shared memory that threads arrive at and wait for apart (sm_80).
#pragma once
#include "ptx/shared.cuh"

namespace cuflash {

__device__ __forceinline__ void mbarrier_init(u64& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
// After the last of them has been set up: the copy engine sees them, too (sm_90).
__device__ __forceinline__ void mbarrier_publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Before the memory is a barrier again.
__device__ __forceinline__ void mbarrier_invalidate(u64& barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u64& barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// Arrives, and has the phase wait for so many bytes of asynchronous copies, too (sm_90).
__device__ __forceinline__ void mbarrier_arrive_expect(u64& barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}
// Whether the phase of this parity is complete: the present one or the one before.
__device__ __forceinline__ bool mbarrier_test(const u64& barrier, u32 parity) {
  u32 complete;
  if constexpr (kTarget >= 90) {  // may suspend the thread for a while
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(complete)
                 : "r"(shared_address(&barrier)), "r"(parity)
                 : "memory");
  } else {
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(complete)
                 : "r"(shared_address(&barrier)), "r"(parity)
                 : "memory");
  }
  return complete;
}
__device__ __forceinline__ void mbarrier_wait(const u64& barrier, u32 parity) {
  while (!mbarrier_test(barrier, parity)) {
  }
}

}  // namespace cuflash
