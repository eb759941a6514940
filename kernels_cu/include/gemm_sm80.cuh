// The family's products: m16n8k16 for 16-bit operands, TF32 for floats, DMMA for doubles.
#pragma once
#include "pack_sm80.cuh"
#include "ptx/mma.cuh"

namespace cuflash {

template <class T>
__device__ __forceinline__ void mma_step(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16(d, a, b, T{});
}

// 16 x 8 x 16 or 16 x 8 x 8: one instruction where the target's tensor cores have it, else its parts of 8 x 8 x 4.
template <int kSlots>
__device__ __forceinline__ void dmma_step(double (&d)[4], const double (&a)[2 * kSlots], const double (&b)[kSlots]) {
  if constexpr (kTarget == 90 && kSlots == 4) {
    dmma_m16n8k16(d, a, b);
  } else if constexpr (kTarget == 90) {
    dmma_m16n8k8(d, a, b);
  } else {
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) dmma_m8n8k4(d[2 * h], d[2 * h + 1], a[2 * s + h], b[s]);
  }
}

}  // namespace cuflash

#include "gemm_16bit.cuh"
#include "gemm_f64.cuh"
#include "gemm_tf32.cuh"

namespace cuflash {
using Gemm =
    ConditionalType<kSame<Operand, double>, GemmF64, ConditionalType<kSame<Operand, float>, GemmTf32, Gemm16Bit>>;
}
