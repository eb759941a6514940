// Copies of adjacent bytes to shared memory by the copy engine (sm_90).
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

}  // namespace cuflash
