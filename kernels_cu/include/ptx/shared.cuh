// Shared memory by address: what a lane computes once and steps from.
#pragma once
#include "common.cuh"

namespace cuflash {

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Loads are volatile with a memory clobber: not to be moved over the barriers that publish or recycle a tile.
__device__ __forceinline__ void ld_shared(double& x, u32 at) {
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(at) : "memory");
}
__device__ __forceinline__ void ld_shared(double (&x)[2], u32 at) {
  asm volatile("ld.shared.v2.f64 {%0,%1}, [%2];" : "=d"(x[0]), "=d"(x[1]) : "r"(at) : "memory");
}
__device__ __forceinline__ void ld_shared(float (&x)[4], u32 at) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ void ld_shared(float (&x)[2], u32 at) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(at) : "memory");
}
__device__ __forceinline__ void ld_shared(float& x, u32 at) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
}
__device__ __forceinline__ void ld_shared(u32& x, u32 at) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
}
__device__ __forceinline__ void ld_shared(u32 (&x)[2], u32 at) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at) : "memory");
}
__device__ __forceinline__ void ld_shared(u32 (&x)[4], u32 at) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}

// Of what no one writes after the barrier that published it: free to be moved.
__device__ __forceinline__ void ld_shared_constant(double& x, u32 at) {
  asm("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(at));
}

__device__ __forceinline__ void st_shared(u32 at, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
__device__ __forceinline__ void st_shared(u32 at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
__device__ __forceinline__ void st_shared(u32 at, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
__device__ __forceinline__ void st_shared(u32 at, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
__device__ __forceinline__ void st_shared(u32 at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void st_shared(u32 at, double x, double y) {
  asm volatile("st.shared.v2.f64 [%0], {%1,%2};" ::"r"(at), "d"(x), "d"(y) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// The same way round (sm_90).
__device__ __forceinline__ void stmatrix_x4(u32 row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace cuflash
