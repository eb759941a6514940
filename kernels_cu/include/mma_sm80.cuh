// The family's tensor-core step: one m16n8k16.
#pragma once
#include "ptx/mma.cuh"

namespace cuflash {

template <class T>
__device__ __forceinline__ void mma_step(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16(d, a, b, T{});
}

}  // namespace cuflash
