// Copies of adjacent bytes to shared memory by the copy engine, and counts of who is done with them (sm_90).
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

// Adds 1 and returns the count before. What the threads did that counted earlier comes before what this one does next.
__device__ __forceinline__ u32 count_shared(u32& count) {
  u32 old;
  asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(shared_address(&count)) : "memory");
  return old;
}
// The same once for a warp, whose lanes all get the count.
__device__ __forceinline__ u32 count_by_warp(u32& count) {
  u32 old = 0;
  if (threadIdx.x % 32 == 0) old = count_shared(count);
  old = __shfl_sync(kFullWarp, old, 0);
  __syncwarp();  // what was ordered for one lane is for all
  return old;
}

}  // namespace cuflash
