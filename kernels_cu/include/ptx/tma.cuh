// Copies of boxes of an array to shared memory by the copy engine (sm_90), which knows the array by a tensor map.
#pragma once
#include "ptx/mbarrier.cuh"

namespace cuflash {

struct alignas(64) TensorMap {
  u64 words[16];
};

// The box at (column, row, batch) to shared memory, with the 128-byte swizzle; zeros where the array ends. Its bytes
// count towards the barrier.
__device__ __forceinline__ void tma_load(u32 smem, const TensorMap& map, u64& barrier, int column, int row,
                                         const int (&batch)[3]) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(smem),
      "l"(&map), "r"(column), "r"(row), "r"(batch[2]), "r"(batch[1]), "r"(batch[0]), "r"(shared_address(&barrier))
      : "memory");
}

// A box of shared memory to the array, cut where the array ends: one of those that the next commit comprises.
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 smem, int column, int row, const int (&batch)[3]) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
               "r"(column), "r"(row), "r"(batch[2]), "r"(batch[1]), "r"(batch[0]), "r"(smem)
               : "memory");
}

// Shared memory that this thread has written or read, or learnt of by a barrier, comes before what copy engine and
// wgmma do to it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace cuflash
