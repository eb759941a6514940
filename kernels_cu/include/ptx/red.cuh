// Unordered addition to global memory: only the mode that was asked not to be deterministic uses it.
#pragma once

namespace cuflash {

__device__ __forceinline__ void red_add(float* gmem, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(gmem), "f"(x) : "memory");
}

}  // namespace cuflash
