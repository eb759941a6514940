// The product that follows the scores of a step, on the grid of warps: each warp multiplies all columns of its rows, by
// the features that are its own. The including kernel chose the family of Gemm.
#pragma once
#include "store.cuh"
#include "warp_grid.cuh"

namespace cuflash {

// acc += x b, x the scores of this warp, whose rows no other warp shares.
template <int kMTiles, int kDepth, int kCols, class SharedB>
__device__ __forceinline__ void accumulate(Fragment<kMTiles, kCols>& acc, const Fragment<kMTiles, kDepth>& x,
                                           const SharedB& b_smem) {
  Gemm::OperandA<kMTiles, kDepth> x_rmem;
  Gemm::to_operand(x_rmem, x);
  Gemm::nn<kDepth>(acc, x_rmem, b_smem, 0);
}

// acc += x b, x the scores that all warps have stored.
template <int kMTiles, int kCols, int kRows, int kDepth, class SharedB>
__device__ __forceinline__ void accumulate(Fragment<kMTiles, kCols>& acc,
                                           const SharedTile<Operand, kRows, kDepth>& x_smem, const SharedB& b_smem) {
  Gemm::nn<kDepth>(acc, x_smem, warp_row() * 16 * kMTiles, b_smem, warp_column() * kCols);
}

// The scores of this warp to its part of the block, where warps share rows.
template <int kMTiles, int kCols, class SharedT>
__device__ __forceinline__ void store_scores(const Fragment<kMTiles, kCols>& x, SharedT& smem) {
  store_fragment(x, smem, warp_row() * 16 * kMTiles, warp_column() * kCols);
}

}  // namespace cuflash
