// The family's products: two m16n8k8 that split the registers of an m16n8k16 between them for float16, ordinary FMAs
// for floats and doubles.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

namespace cuflash {

template <class T>
__device__ __forceinline__ void mma_step(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  static_assert(kSame<T, Half>, "Turing's tensor cores have no bfloat16");
  mma_m16n8k8(d, a[0], a[1], b[0], T{});
  mma_m16n8k8(d, a[2], a[3], b[1], T{});
}

template <class T>
__device__ __forceinline__ u32 pack(float low, float high) {
  return u32(from_float<T>(low).bits) | u32(from_float<T>(high).bits) << 16;
}

}  // namespace cuflash

#include "gemm_16bit.cuh"
#include "gemm_fma.cuh"

namespace cuflash {
using Gemm = ConditionalType<sizeof(Operand) == 2, Gemm16Bit, GemmFma>;
}
