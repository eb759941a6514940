// Register tiles of one warp and the logical position of each element: nothing above this file knows a lane id.
// The including kernel chose the family of pack().
#pragma once
#include "common.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "shared.cuh"

namespace cuflash {

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

// Accumulators of (16 * kMTiles) x kCols, as mma.sync leaves them: element 2 * h + j of an 8-column tile is at row
// lane / 4 + 8 * h, column 2 * (lane % 4) + j.
template <int kMTiles, int kCols>
struct Fragment {
  static constexpr int kNTiles = kCols / 8;
  float x[kMTiles][kNTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] = 0.f;
  }

  // f(element, row slot, row, column): row and column within the warp's tile; 2 * kMTiles row slots a lane.
  template <class F>
  __device__ __forceinline__ void for_each(F f) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          f(x[m][n][i], 2 * m + i / 2, lane_id() / 4 + 16 * m + 8 * (i / 2), 2 * (lane_id() % 4) + 8 * n + i % 2);
  }

  // f(this element, the other fragment's element, row slot, row, column).
  template <class F>
  __device__ __forceinline__ void for_each_with(Fragment& other, F f) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          f(x[m][n][i], other.x[m][n][i], 2 * m + i / 2, lane_id() / 4 + 16 * m + 8 * (i / 2),
            2 * (lane_id() % 4) + 8 * n + i % 2);
  }

  // f(element) for what this lane holds of one row.
  template <class F>
  __device__ __forceinline__ void for_each_in_row(int slot, F f) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) f(x[slot / 2][n][2 * (slot % 2) + j]);
  }

  // f(element, index): index counts 8-column tiles, then registers, then lanes. 16 rows are 16 * kCols elements.
  template <class F>
  __device__ __forceinline__ void for_each_in_order(F f) {
    static_assert(kMTiles == 1, "one 16-row tile at a time");
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(x[0][n][i], (4 * n + i) * 32 + lane_id());
  }

  // f(row slot, row): the rows of which this lane holds elements.
  template <class F>
  static __device__ __forceinline__ void for_each_row(F f) {
#pragma unroll
    for (int r = 0; r < 2 * kMTiles; ++r) f(r, lane_id() / 4 + 8 * r);
  }
};

// A quad of lanes holds a row between them.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// The A operand of a product over kCols: accumulators of column tiles 2k and 2k+1, rounded, are its k step k.
template <int kMTiles, int kCols>
struct OperandA {
  u32 x[kMTiles][kCols / 16][4];
};

template <class T, int kMTiles, int kCols>
__device__ __forceinline__ void to_operand(OperandA<kMTiles, kCols>& a, const Fragment<kMTiles, kCols>& f) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int k = 0; k < kCols / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&tile)[4] = f.x[m][2 * k + i / 2];
        a.x[m][k][i] = pack<T>(tile[2 * (i % 2)], tile[2 * (i % 2) + 1]);
      }
}

// The operand's elements to the warp's rows of a tile.
template <int kMTiles, int kCols, class SharedT>
__device__ __forceinline__ void store_operand(const OperandA<kMTiles, kCols>& a, SharedT& tile, int row0) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int k = 0; k < kCols / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u16* to = tile.at(row0 + 16 * m + lane_id() / 4 + 8 * (i % 2), 2 * k + i / 2) + 2 * (lane_id() % 4);
        *reinterpret_cast<u32*>(to) = a.x[m][k][i];
      }
}

// Rows row0 .. row0+15, k step `k` of a row-major tile, as an A operand.
template <class SharedT>
__device__ __forceinline__ void load_a(u32 (&a)[4], const SharedT& tile, int row0, int k) {
  ldmatrix_x4(a, tile.at(row0 + lane_id() % 16, 2 * k + lane_id() / 16));
}
// Columns row0 .. row0+15 of a tile stored as (k, m), rows of k step `k`, as an A operand.
template <class SharedT>
__device__ __forceinline__ void load_a_trans(u32 (&a)[4], const SharedT& tile, int row0, int k) {
  ldmatrix_x4_trans(a, tile.at(16 * k + lane_id() % 8 + lane_id() / 16 * 8, row0 / 8 + lane_id() / 8 % 2));
}
// Rows n0 .. n0+15 of a tile stored as (n, k), k step `k`: two B operands of 8 columns.
template <class SharedT>
__device__ __forceinline__ void load_b(u32 (&b)[4], const SharedT& tile, int n0, int k) {
  ldmatrix_x4(b, tile.at(n0 + lane_id() % 8 + lane_id() / 16 * 8, 2 * k + lane_id() / 8 % 2));
}
// Columns n0 .. n0+15 of a tile stored as (k, n), rows of k step `k`: two B operands of 8 columns.
template <class SharedT>
__device__ __forceinline__ void load_b_trans(u32 (&b)[4], const SharedT& tile, int n0, int k) {
  ldmatrix_x4_trans(b, tile.at(16 * k + lane_id() % 16, n0 / 8 + lane_id() / 16));
}

}  // namespace cuflash
