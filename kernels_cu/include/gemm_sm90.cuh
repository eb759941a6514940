// Products of a warpgroup, issued and not waited for: wgmma on tiles that the copy engine has brought with the 128-byte
// swizzle, which is SharedTile's.
//
// Floats come as planes (planes.cuh). Of the products of planes the larger ones are formed, the smallest of them first:
// tensor cores cut off what a sum cannot hold, and where the sum begins with them lose least so.
#pragma once
#include "fragment.cuh"
#include "planes.cuh"
#include "ptx/wgmma.cuh"
#include "shared.cuh"

namespace cuflash {

using Plane = ConditionalType<kPlanes == 1, Operand, BFloat16>;

// What the copy engine writes: panels of 64 columns, from multiples of 1024 bytes on.
template <int kRows, int kCols>
struct alignas(1024) PanelTile : SharedTile<Plane, kRows, 64 * ceil_div(kCols, 64)> {
  static constexpr int kPanels = ceil_div(kCols, 64);
  static_assert(kRows % 8 == 0, "panels are whole repetitions of the swizzle");
};

// Shared memory as wgmma names it: the address, the distance of panels where columns run across them, that of bands of
// 8 rows, and the swizzle.
__device__ __forceinline__ u64 make_smem_desc(const void* tile, int panel_bytes) {
  return u64(shared_address(tile) >> 4) | u64(panel_bytes >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// The same of rows of 16 bytes that follow each other without a swizzle. Steps are two such columns of 8: these are
// one, twice.
__device__ __forceinline__ u64 make_rows_desc(const void* rows) {
  return u64(shared_address(rows) >> 4) | u64(8 * 16 >> 4) << 32;
}

// The planes of the left and the right operand in a product.
struct PlanePair {
  int a, b;
};
constexpr int kPlanePairs = kPlanes * (kPlanes + 1) / 2;
// By ascending size. Left out is at most 2^-20 of a product where planes are three (2^-25 in the mean; a float rounds
// to 2^-24), and 2^-14 (2^-17) where they are two.
constexpr PlanePair plane_pair(int number) {
  for (int total = kPlanes - 1; total >= 0; --total)
    for (int a = 0; a <= total; ++a)
      if (number-- == 0) return {a, total - a};
  return {0, 0};
}

// Until at most kPending batches are on their way, f's not among them: nothing that reads f is moved before this.
template <int kPending, int kCols>
__device__ __forceinline__ void wgmma_wait(Fragment<1, kCols>& f) {
  wgmma_wait<kPending>();
  f.for_each([](float& x, int, int, int) { asm volatile("" : "+f"(x)::"memory"); });
}

template <int kCols>
using Sums = float (&)[kCols / 2];
template <int kCols>
__device__ __forceinline__ Sums<kCols> sums_of(Fragment<1, kCols>& f) {
  return reinterpret_cast<Sums<kCols>>(f.x);
}

// An operand in shared memory, plane by plane.
template <class Tile>
using Planes = Tile[kPlanes];

// s = A B^T, or s += A B^T unless the sum begins: 64 rows of A from row0 on.
template <int kDepth, int kCols, class TileA, class TileB>
__device__ __forceinline__ void issue_nt(Fragment<1, kCols>& s, const Planes<TileA>& a_smem, int row0,
                                         const Planes<TileB>& b_smem, bool begins = true) {
  wgmma_fence();
#pragma unroll
  for (int pair = 0; pair < kPlanePairs; ++pair) {
    const PlanePair planes = plane_pair(pair);
    const u64 a = make_smem_desc(&a_smem[planes.a], 16) + (row0 * 128 >> 4), b = make_smem_desc(&b_smem[planes.b], 16);
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      const int panel = k / 4, step = k % 4 * (32 >> 4);  // 16 columns are 32 bytes
      Wgmma<kCols>::nt(sums_of(s), a + (step + panel * (TileA::kPanelBytes >> 4)),
                       b + (step + panel * (TileB::kPanelBytes >> 4)), pair + k > 0 || !begins, Plane{});
    }
  }
  wgmma_commit();
}

// Accumulators as the left operand.
template <int kDepth>
struct OperandA {
  u32 x[kPlanes][kDepth / 16][4];

  __device__ __forceinline__ void from(const Fragment<1, kDepth>& f) {
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = f.x[0][2 * k + i / 2];
        set(4 * k + i, pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
  }
  // Neighbours of an accumulator, numbered tile by tile, and row by row in it.
  __device__ __forceinline__ void set(int number, float low, float high) {
    u32 planes[kPlanes];
    split_pair<Plane>(low, high, planes);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) x[plane][number / 4][number % 4] = planes[plane];
  }
};

// The operand of a warp from its 16 rows of a tile, from row0 and col0 on.
template <int kDepth, class Tile>
__device__ __forceinline__ void load_operand(OperandA<kDepth>& a, const Planes<Tile>& smem, int row0, int col0) {
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
      ldmatrix_x4(a.x[plane][k], smem[plane].address(row0 + lane_id() % 16, col0 + 16 * k + lane_id() / 16 * 8));
}

// The products of s = A B^T, of which the last columns of A are in registers: that saves reads of shared memory.
template <int kDepth, int kHeld, int kCols, class TileA, class TileB>
__device__ __forceinline__ void multiply_nt(Fragment<1, kCols>& s, const Planes<TileA>& a_smem, int row0,
                                            const u32 (*held)[4], const Planes<TileB>& b_smem) {
  static_assert(kPlanes == 1);
  static_assert(kHeld < kDepth / 16, "the first one begins the sum");
  const u64 a = make_smem_desc(&a_smem[0], 16) + (row0 * 128 >> 4), b = make_smem_desc(&b_smem[0], 16);
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    const int panel = k / 4, step = k % 4 * (32 >> 4);  // 16 columns are 32 bytes
    const u64 b_step = b + (step + panel * (TileB::kPanelBytes >> 4));
    if (k < kDepth / 16 - kHeld) {
      Wgmma<kCols>::nt(sums_of(s), a + (step + panel * (TileA::kPanelBytes >> 4)), b_step, k > 0, Plane{});
    } else {
      Wgmma<kCols>::rt(sums_of(s), held[k - (kDepth / 16 - kHeld)], b_step, Plane{});
    }
  }
}

// s = A B^T.
template <int kDepth, int kHeld, int kCols, class TileA, class TileB>
__device__ __forceinline__ void issue_nt(Fragment<1, kCols>& s, const Planes<TileA>& a_smem, int row0,
                                         const u32 (*held)[4], const Planes<TileB>& b_smem) {
  wgmma_fence();
  multiply_nt<kDepth, kHeld>(s, a_smem, row0, held, b_smem);
  wgmma_commit();
}

// s = A B^T + C D^T. C's 16 columns are two registers of the same rows and 0; D has rows of 16 bytes, bfloat16, and no
// other columns than those 8.
template <int kDepth, int kHeld, int kCols, class TileA, class TileB>
__device__ __forceinline__ void issue_nt(Fragment<1, kCols>& s, const Planes<TileA>& a_smem, int row0,
                                         const u32 (*held)[4], const Planes<TileB>& b_smem, const u32 (&c)[4],
                                         const void* d_smem) {
  wgmma_fence();
  multiply_nt<kDepth, kHeld>(s, a_smem, row0, held, b_smem);
  Wgmma<kCols>::rt(sums_of(s), c, make_rows_desc(d_smem), BFloat16{});
  wgmma_commit();
}

// o += A B, or o = A B where the sum begins.
template <int kDepth, int kCols, class TileB>
__device__ __forceinline__ void issue_nn(Fragment<1, kCols>& o, const OperandA<kDepth>& a, const Planes<TileB>& b_smem,
                                         bool begins = false) {
  wgmma_fence();
#pragma unroll
  for (int pair = 0; pair < kPlanePairs; ++pair) {
    const PlanePair planes = plane_pair(pair);
    const u64 b = make_smem_desc(&b_smem[planes.b], TileB::kPanelBytes);
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
      Wgmma<kCols>::nn(sums_of(o), a.x[planes.a][k], b + k * (16 * 128 >> 4), pair + k > 0 || !begins, Plane{});
  }
  wgmma_commit();
}

// s = A^T B: of both a panel of 64 columns, kDepth rows.
template <int kDepth, class TileA, class TileB>
__device__ __forceinline__ void issue_tn(Fragment<1, 64>& s, const TileA& a_smem, int panel_a, const TileB& b_smem,
                                         int panel_b) {
  wgmma_fence();
  const u64 a = make_smem_desc(&a_smem, 16) + (panel_a * TileA::kPanelBytes >> 4);
  const u64 b = make_smem_desc(&b_smem, 16) + (panel_b * TileB::kPanelBytes >> 4);
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k)
    Wgmma<64>::tn(sums_of(s), a + k * (16 * 128 >> 4), b + k * (16 * 128 >> 4), k > 0, Plane{});
  wgmma_commit();
}

}  // namespace cuflash
