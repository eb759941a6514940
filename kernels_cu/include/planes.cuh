// Floats as sums of bfloat16 planes. Three planes of 8 bits hold all 24 bits of a float, two hold 16. Cut off, not
// rounded: the largest float stays finite.
#pragma once
#include "pack_sm80.cuh"

namespace cuflash {

constexpr int kPlanes = !kSame<Operand, float> ? 1 : kTf32 ? 2 : 3;

// Plane by plane, two neighbours at a time; the last plane is rounded.
template <class T, int kCount>
__device__ __forceinline__ void split_pair(float low, float high, u32 (&planes)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount - 1; ++i) {
    const u32 low_bits = __float_as_uint(low), high_bits = __float_as_uint(high);
    planes[i] = __byte_perm(low_bits, high_bits, 0x7632);  // the upper halves
    low -= __uint_as_float(low_bits & 0xffff0000u);
    high -= __uint_as_float(high_bits & 0xffff0000u);
  }
  planes[kCount - 1] = pack<T>(low, high);
}

}  // namespace cuflash
