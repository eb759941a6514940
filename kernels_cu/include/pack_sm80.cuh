// The family's rounding of two neighbours to 16 bits: one instruction.
#pragma once
#include "ptx/convert.cuh"

namespace cuflash {

template <class T>
__device__ __forceinline__ u32 pack(float low, float high) {
  return cvt_x2(low, high, T{});
}

}  // namespace cuflash
