// Products of one warp over doubles. The including kernel chose dmma_step(), its tensor-core step.
//
// A k step is 16 deep, and slot t + 4 * s of it (t = lane % 4, s < 4) may be any column as long as A and B agree. Where
// both come row by row, lane t takes columns 4t .. 4t+3: two 16-byte loads. Where A is an accumulator, slots 0 and 1
// are its columns 2t and 2t+1 of one 8-column tile and slots 2 and 3 those of the next: nothing moves between lanes.
// A depth of 8 is a single step of half as many slots: lane t takes columns 2t and 2t+1.
#pragma once
#include "fragment.cuh"
#include "plain_tiles.cuh"

namespace cuflash {

struct GemmF64 : PlainTiles, AccumulatorOperand {
  // acc += A B^T: A rows row0.. of a tile (rows, k), B rows col0.. of a tile (cols, k).
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void nt(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
    if constexpr (kDepth == 8) return nt_step8(acc, a_smem, row0, b_smem, col0);
    const u32 a_at = a_smem.address(row0 + lane_id() / 4, 4 * (lane_id() % 4));
    const u32 b_at = b_smem.address(col0 + lane_id() / 4, 4 * (lane_id() % 4));
    // Where a step is short, more than a few in one piece have the compiler run out of registers for what it loads
    // ahead.
    constexpr int kUnroll = kCols >= 32 ? 8 : 4;
#pragma unroll kUnroll
    for (int k = 0; k < kDepth / 16; ++k) {
      double a[kMTiles][8];
      load_a<SharedA, 2>(a, a_at, k);
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
        double b[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) ld_shared(b[i], SharedB::advance(b_at, 8 * n, 16 * k + 2 * i));
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) dmma_step<4>(acc.x[m][n], a[m], {b[0][0], b[0][1], b[1][0], b[1][1]});
      }
    }
  }

  // acc += A B: A in registers (rows, k), B columns col0.. of a tile (k, cols) from row k0 on.
  template <int kDepth, int kMTiles, int kCols, class SharedB>
  static __device__ __forceinline__ void nn(Fragment<kMTiles, kCols>& acc, const OperandA<kMTiles, kDepth>& a_rmem,
                                            const SharedB& b_smem, int col0, int k0 = 0) {
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      double a[kMTiles][8];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int i = 0; i < 8; ++i) a[m][i] = a_rmem.x[m][2 * k + i / 4][2 * (i % 2) + i / 2 % 2];
      step_nn(acc, a, b_smem, k, col0, k0);
    }
  }

  // acc += A B: A rows row0.. of a tile (rows, k), B columns col0.. of a tile (k, cols).
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void nn(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
    const u32 a_at = a_smem.address(row0 + lane_id() / 4, 2 * (lane_id() % 4));
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      double a[kMTiles][8];
      load_a<SharedA, 8>(a, a_at, k);
      step_nn(acc, a, b_smem, k, col0);
    }
  }

  // acc += A^T B: A columns row0.. of a tile (k, rows), B columns col0.. of a tile (k, cols).
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void tn(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
    const u32 a_at[2] = {a_smem.address(2 * (lane_id() % 4), row0 + lane_id() / 4),
                         a_smem.address(2 * (lane_id() % 4) + 1, row0 + lane_id() / 4)};
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      double a[kMTiles][8];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int i = 0; i < 8; ++i)  // slot i / 2
          ld_shared(a[m][i], SharedA::advance(a_at[i / 2 % 2], 16 * k + 8 * (i / 4), 16 * m + 8 * (i % 2)));
      step_nn(acc, a, b_smem, k, col0);
    }
  }

 private:
  template <int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void nt_step8(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                                  const SharedB& b_smem, int col0) {
    const u32 a_at = a_smem.address(row0 + lane_id() / 4, 2 * (lane_id() % 4));
    const u32 b_at = b_smem.address(col0 + lane_id() / 4, 2 * (lane_id() % 4));
    double a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)  // slot i / 2; one by one: the tensor core wants them in this order
        ld_shared(a[m][i], SharedA::advance(a_at, 16 * m + 8 * (i % 2), 0) + 8 * (i / 2));
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      double b[2];
      ld_shared(b, SharedB::advance(b_at, 8 * n, 0));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) dmma_step<2>(acc.x[m][n], a[m], b);
    }
  }

  // A of k step `k` where it comes row by row: slots 0 and 1 are two columns at a_at, slots 2 and 3 two columns
  // `kApart` further.
  template <class SharedA, int kApart, int kMTiles>
  static __device__ __forceinline__ void load_a(double (&a)[kMTiles][8], u32 a_at, int k) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // half i % 2 of the rows, pair i / 2 of the slots
        double x[2];
        ld_shared(x, SharedA::advance(a_at, 16 * m + 8 * (i % 2), 16 * k + kApart * (i / 2)));
        a[m][4 * (i / 2) + i % 2] = x[0];
        a[m][4 * (i / 2) + 2 + i % 2] = x[1];
      }
  }

  template <int kMTiles, int kCols, class SharedB>
  static __device__ __forceinline__ void step_nn(Fragment<kMTiles, kCols>& acc, const double (&a)[kMTiles][8],
                                                 const SharedB& b_smem, int k, int col0, int k0 = 0) {
    const u32 b_at[2] = {b_smem.address(k0 + 2 * (lane_id() % 4), col0 + lane_id() / 4),
                         b_smem.address(k0 + 2 * (lane_id() % 4) + 1, col0 + lane_id() / 4)};
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      double b[4];
#pragma unroll
      for (int s = 0; s < 4; ++s) ld_shared(b[s], SharedB::advance(b_at[s % 2], 16 * k + 8 * (s / 2), 8 * n));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) dmma_step<4>(acc.x[m][n], a[m], b);
    }
  }
};

}  // namespace cuflash
