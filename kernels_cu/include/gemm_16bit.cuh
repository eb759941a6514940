// Products of one warp over 16-bit operands with float32 accumulation. The including kernel chose the family of
// mma_step() and pack(), which are its tensor-core step and its rounding of two neighbours.
#pragma once
#include "fragment.cuh"
#include "plain_tiles.cuh"

namespace cuflash {

struct Gemm16Bit : PlainTiles {
  // The A operand of a product over kDepth: accumulators of column tiles 2k and 2k+1, rounded, are its k step k.
  template <int kMTiles, int kDepth>
  struct OperandA {
    u32 x[kMTiles][kDepth / 16][4];
  };

  template <int kMTiles, int kDepth>
  static __device__ __forceinline__ void to_operand(OperandA<kMTiles, kDepth>& a, const Fragment<kMTiles, kDepth>& f) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&tile)[4] = f.x[m][2 * k + i / 2];
          a.x[m][k][i] = pack<Operand>(tile[2 * (i % 2)], tile[2 * (i % 2) + 1]);
        }
  }

  // acc += A B^T: A rows row0.. of a tile (rows, k), B rows col0.. of a tile (cols, k).
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void nt(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
    static_assert(kCols % 16 == 0, "ldmatrix brings 16 rows of B");
    const u32 a_at = a_smem.address(row0 + lane_id() % 16, lane_id() / 16 * 8);
    const u32 b_at = b_smem.address(col0 + lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2 * 8);
#pragma unroll kUnroll
    for (int k = 0; k < kDepth / 16; ++k) {
      u32 a[kMTiles][4];
      load_a<SharedA>(a, a_at, k);
#pragma unroll
      for (int n = 0; n < kCols / 16; ++n) {
        u32 b[4];
        ldmatrix_x4(b, SharedB::advance(b_at, 16 * n, 16 * k));
        mma_pair(acc, a, b, 2 * n);
      }
    }
  }

  // acc += A B: A in registers (rows, k), B columns col0.. of a tile (k, cols).
  template <int kDepth, int kMTiles, int kCols, class SharedB>
  static __device__ __forceinline__ void nn(Fragment<kMTiles, kCols>& acc, const OperandA<kMTiles, kDepth>& a_rmem,
                                            const SharedB& b_smem, int col0) {
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      u32 a[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = a_rmem.x[m][k][i];
      step_nn(acc, a, b_smem, k, col0);
    }
  }

  // acc += A B: A rows row0.. of a tile (rows, k), B columns col0.. of a tile (k, cols).
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void nn(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
    const u32 a_at = a_smem.address(row0 + lane_id() % 16, lane_id() / 16 * 8);
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      u32 a[kMTiles][4];
      load_a<SharedA>(a, a_at, k);
      step_nn(acc, a, b_smem, k, col0);
    }
  }

  // acc += A^T B: A columns row0.. of a tile (k, rows), B columns col0.. of a tile (k, cols).
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void tn(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
    const u32 a_at = a_smem.address(lane_id() % 8 + lane_id() / 16 * 8, row0 + lane_id() / 8 % 2 * 8);
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      u32 a[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) ldmatrix_x4_trans(a[m], SharedA::advance(a_at, 16 * k, 16 * m));
      step_nn(acc, a, b_smem, k, col0);
    }
  }

 private:
  // Steps of nt in one piece: the fused backward spills where all 16 of 256 features are, three CTAs an SM where all 4
  // of 64 are.
  static constexpr int kUnroll = kTile.resident > 1 ? 2 : 8;

  // A of k step `k` where it comes row by row.
  template <class SharedA, int kMTiles>
  static __device__ __forceinline__ void load_a(u32 (&a)[kMTiles][4], u32 a_at, int k) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) ldmatrix_x4(a[m], SharedA::advance(a_at, 16 * m, 16 * k));
  }

  template <int kMTiles, int kCols, class SharedB>
  static __device__ __forceinline__ void step_nn(Fragment<kMTiles, kCols>& acc, const u32 (&a)[kMTiles][4],
                                                 const SharedB& b_smem, int k, int col0) {
    const u32 b_at = b_smem.address(lane_id() % 16, col0 + lane_id() / 16 * 8);
#pragma unroll
    for (int n = 0; n < kCols / 16; ++n) {
      u32 b[4];
      ldmatrix_x4_trans(b, SharedB::advance(b_at, 16 * k, 16 * n));
      mma_pair(acc, a, b, 2 * n);
    }
  }

  template <int kMTiles, int kCols>
  static __device__ __forceinline__ void mma_pair(Fragment<kMTiles, kCols>& acc, const u32 (&a)[kMTiles][4],
                                                  const u32 (&b)[4], int n_tile) {
    const u32 b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      mma_step<Operand>(acc.x[m][n_tile], a[m], b0);
      mma_step<Operand>(acc.x[m][n_tile + 1], a[m], b1);
    }
  }
};

}  // namespace cuflash
