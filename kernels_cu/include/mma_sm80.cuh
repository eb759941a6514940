// The family's tensor-core step, one m16n8k16, and the rounding of its operands.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

namespace cuflash {

template <class T>
__device__ __forceinline__ void mma_step(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16(d, a, b, T{});
}

template <class T>
__device__ __forceinline__ u32 pack(float low, float high) {
  return cvt_x2(low, high, T{});
}

}  // namespace cuflash
