// dQ of the fused backward: sums in global memory to which the CTAs of all keys add, in register order, so that each
// instruction of a warp adds to successive bytes. The including kernel chose the family of Gemm.
#pragma once
#include "order.cuh"
#include "red.cuh"
#include "warp_grid.cuh"

namespace cuflash {

// The CTA's part for one query block, of ds that all warps have stored: each takes some rows and columns. It waits for
// the CTA's turn by itself, where it needs the sums: not before a barrier, where the whole CTA would.
template <class Storage, class SharedT>
__device__ __forceinline__ void add_dq(const Params& params, Storage& smem, const SharedT& ds_smem, int block) {
  constexpr int kTall = ceil_div(kTile.block_m, 32);  // 32 rows a warp, or 16 where that would leave it few columns
  constexpr int kRowParts = kTile.head_dim * kTall >= 16 * kTile.warps ? kTall : 2 * kTall;
  constexpr int kColumnParts = kTile.warps / kRowParts;
  constexpr int kTiles = kTile.block_m / (16 * kRowParts), kCols = kTile.head_dim / kColumnParts;
  static_assert(kRowParts * kColumnParts == kTile.warps && kCols % 16 == 0, "the warps divide a block of dq evenly");
  const int warp_row0 = warp_id() % kRowParts * 16 * kTiles, col0 = warp_id() / kRowParts * kCols;
  const int block_row0 = block * kTile.block_m, row0 = block_row0 + warp_row0;
  const int rows = params.seqlen_q - row0;  // memory ends with the tile
  Accumulator* const lane_gmem = smem.batch.dq_accum + i64(row0) * kTile.head_dim + col0 * 16 + lane_index();
  const auto tile_at = [&](int row, int col) { return lane_gmem + (row * kTile.head_dim + col * 16); };
  const auto wait = [&] {
    if constexpr (kOrdered)
      await_turn(params, smem.order, smem.batch.dq_turn + block, block_row0, kTile.block_m, kTile.block_n);
  };
  Fragment<kTiles, kCols> dq;
  dq.clear();
  if constexpr (kOrdered && kSame<Operand, float>) {
    wait();
    dq.for_each_tile([&](Accumulator(&x)[4], int row, int col) {
      if (row < rows) load_tile_sums(x, tile_at(row, col));
    });
    Gemm::tn<kTile.block_n>(dq, ds_smem, warp_row0, smem.k, col0);  // its first chain while the sums are on their way
    dq.for_each_tile([&](Accumulator(&x)[4], int row, int col) {
      if (row < rows) store_tile_sums(tile_at(row, col), x);
    });
  } else {
    Gemm::tn<kTile.block_n>(dq, ds_smem, warp_row0, smem.k, col0);
    wait();
    dq.for_each_tile([&](Accumulator(&x)[4], int row, int col) {
      if (row < rows) red_add_tile(tile_at(row, col), x);
    });
  }
}

}  // namespace cuflash
