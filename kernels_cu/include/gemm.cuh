// Products of one warp over tiles in shared memory and registers. The including kernel chose mma_step's family.
#pragma once
#include "fragment.cuh"

namespace cuflash {

template <class T, int kMTiles, int kCols>
__device__ __forceinline__ void mma_pair(Fragment<kMTiles, kCols>& acc, const u32 (&a)[kMTiles][4], const u32 (&b)[4],
                                         int n_tile) {
  const u32 b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
    mma_step<T>(acc.x[m][n_tile], a[m], b0);
    mma_step<T>(acc.x[m][n_tile + 1], a[m], b1);
  }
}

// acc += A B^T: A rows row0.. of a tile (rows, k), B a tile (kCols, k), both in shared memory.
template <class T, int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
__device__ __forceinline__ void gemm_nt(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                        const SharedB& b_smem) {
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    u32 a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) load_a(a[m], a_smem, row0 + 16 * m, k);
#pragma unroll
    for (int n = 0; n < kCols / 16; ++n) {
      u32 b[4];
      load_b(b, b_smem, 16 * n, k);
      mma_pair<T>(acc, a, b, 2 * n);
    }
  }
}

// acc += A B: A in registers (rows, k), B a tile (k, kCols) in shared memory.
template <class T, int kDepth, int kMTiles, int kCols, class SharedB>
__device__ __forceinline__ void gemm_nn(Fragment<kMTiles, kCols>& acc, const OperandA<kMTiles, kDepth>& a_rmem,
                                        const SharedB& b_smem) {
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    u32 a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m][i] = a_rmem.x[m][k][i];
#pragma unroll
    for (int n = 0; n < kCols / 16; ++n) {
      u32 b[4];
      load_b_trans(b, b_smem, 16 * n, k);
      mma_pair<T>(acc, a, b, 2 * n);
    }
  }
}

}  // namespace cuflash
