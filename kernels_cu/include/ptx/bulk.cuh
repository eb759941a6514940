// Copies of adjacent bytes by the copy engine (sm_90): between shared memory and global memory.
#pragma once
#include "ptx/mbarrier.cuh"

namespace cuflash {

// So many bytes, a multiple of 16, between multiples of 16; they count towards the barrier.
__device__ __forceinline__ void bulk_load(void* smem, const void* gmem, u32 bytes, u64& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(smem)),
               "l"(gmem), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// So many bytes of shared memory to global memory, or floats added to those there: one of those that the next commit
// comprises.
__device__ __forceinline__ void bulk_store(void* gmem, const void* smem, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem), "r"(shared_address(smem)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_add(float* gmem, const float* smem, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem),
               "r"(shared_address(smem)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all that this thread has committed is where it is to be.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Until at most kPending of the groups that this thread has committed are still to be read from shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// What the copy engine has written comes before what this thread does, and the other way round: in all memory.
__device__ __forceinline__ void fence_async_proxy_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace cuflash
