// Addition to global memory.
#pragma once
#include "fragment.cuh"

namespace cuflash {

// Whether one instruction adds the four registers of a lane.
constexpr bool kVectorRed = kTarget >= 90 && sizeof(Accumulator) == 4;

// Where the registers of a warp's 16 x 8 tile lie in memory, so that each instruction covers whole sectors: the lane's
// first, and from there register i.
__device__ __forceinline__ int lane_index() { return kVectorRed ? 4 * lane_id() : lane_id(); }
constexpr int register_step(int i) { return kVectorRed ? i : 32 * i; }

__device__ __forceinline__ void red_add(float* gmem, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(gmem), "f"(x) : "memory");
}
__device__ __forceinline__ void red_add(double* gmem, double x) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(gmem), "d"(x) : "memory");
}
__device__ __forceinline__ void red_add_vector(float* gmem, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(gmem), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// Here and below `gmem` is the address of the lane's first register.
template <class T>
__device__ __forceinline__ void red_add_tile(T* gmem, const T (&x)[4]) {
  if constexpr (kVectorRed) {
    red_add_vector(gmem, x);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) red_add(gmem + register_step(i), x[i]);
  }
}

// The same by a load and a store, for whoever has the memory to itself: additions in memory flush subnormal floats to
// zero. Past L1, which may hold what another SM has replaced.
__device__ __forceinline__ void ld_past_l1(float& x, const float* gmem) {
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(gmem) : "memory");
}
__device__ __forceinline__ void ld_past_l1(double& x, const double* gmem) {
  asm volatile("ld.global.cg.f64 %0, [%1];" : "=d"(x) : "l"(gmem) : "memory");
}
__device__ __forceinline__ void ld_past_l1_vector(float (&x)[4], const float* gmem) {
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(gmem)
               : "memory");
}
__device__ __forceinline__ void st_past_l1(float* gmem, float x) {
  asm volatile("st.global.cg.f32 [%0], %1;" ::"l"(gmem), "f"(x) : "memory");
}
__device__ __forceinline__ void st_past_l1_vector(float* gmem, const float (&x)[4]) {
  asm volatile("st.global.cg.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(gmem), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
template <class T>
__device__ __forceinline__ void load_tile_sums(T (&sum)[4], const T* gmem) {
  if constexpr (kVectorRed) {
    ld_past_l1_vector(sum, gmem);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) ld_past_l1(sum[i], gmem + register_step(i));
  }
}
template <class T>
__device__ __forceinline__ void store_tile_sums(T* gmem, const T (&sum)[4]) {
  if constexpr (kVectorRed) {
    st_past_l1_vector(gmem, sum);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) st_past_l1(gmem + register_step(i), sum[i]);
  }
}

}  // namespace cuflash
