// Register tiles of one warp and the logical position of each element: nothing above this file knows a lane id.
#pragma once
#include "accumulator.cuh"

namespace cuflash {

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

// Accumulators of (16 * kMTiles) x kCols, as mma.sync leaves them: element 2 * h + j of an 8-column tile is at row
// lane / 4 + 8 * h, column 2 * (lane % 4) + j.
template <int kMTiles, int kCols>
struct Fragment {
  static constexpr int kNTiles = kCols / 8;
  Accumulator x[kMTiles][kNTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] = 0;
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

  // f(element, row slot, column from this lane's first): a column that is known when compiling.
  template <class F>
  __device__ __forceinline__ void for_each_lane_column(F f) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) f(x[m][n][i], 2 * m + i / 2, 8 * n + i % 2);
  }

  // f(element) for what this lane holds of one row.
  template <class F>
  __device__ __forceinline__ void for_each_in_row(int slot, F f) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) f(x[slot / 2][n][2 * (slot % 2) + j]);
  }

  // f(registers, row, column): the first row and column of each tile of 16 rows and 8 columns.
  template <class F>
  __device__ __forceinline__ void for_each_tile(F f) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) f(x[m][n], 16 * m, 8 * n);
  }

  // f(row slot, row): the rows of which this lane holds elements.
  template <class F>
  static __device__ __forceinline__ void for_each_row(F f) {
#pragma unroll
    for (int r = 0; r < 2 * kMTiles; ++r) f(r, lane_id() / 4 + 8 * r);
  }
};

// What products have for operand A where accumulators are one as they are.
struct AccumulatorOperand {
  template <int kMTiles, int kDepth>
  using OperandA = Fragment<kMTiles, kDepth>;

  template <int kMTiles, int kDepth>
  static __device__ __forceinline__ void to_operand(OperandA<kMTiles, kDepth>& a, const Fragment<kMTiles, kDepth>& f) {
    a = f;
  }
};

// A quad of lanes holds a row between them.
__device__ __forceinline__ Accumulator quad_max(Accumulator x) {
  x = larger(x, __shfl_xor_sync(kFullWarp, x, 1));
  return larger(x, __shfl_xor_sync(kFullWarp, x, 2));
}
__device__ __forceinline__ Accumulator quad_sum(Accumulator x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

}  // namespace cuflash
