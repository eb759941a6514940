// Forward: one CTA a tile of query rows, key blocks from last to first, K and V refilled while the other is in use.
// The outline is host.py's: locate; key blocks; load Q; step; finish; epilogue.
#pragma once
#include "blocks.cuh"
#include "epilogue.cuh"
#include "gemm.cuh"
#include "locate.cuh"
#include "pipeline.cuh"
#include "softmax.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps;
constexpr int kMTiles = kTile.block_m / (16 * kTile.warps);
static_assert(kMTiles * 16 * kTile.warps == kTile.block_m, "each warp owns whole 16-row tiles");
static_assert(kTile.value_dim <= kTile.head_dim, "o is staged in q's tile");
static_assert(kTile.block_n % 16 == 0, "p is an A operand of whole k steps");

struct SharedStorage {
  SharedTile<kTile.block_m, kTile.head_dim> q;
  SharedTile<kTile.block_n, kTile.head_dim> k;
  SharedTile<kTile.block_n, kTile.value_dim> v;
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

using Scores = Fragment<kMTiles, kTile.block_n>;

// Score terms and, unless the whole block is seen, masks; row0 and key0 are the first of the warp's tile.
template <bool kMasked>
__device__ __forceinline__ void apply_score_terms(Scores& s, const Params& p, const KeyBias& key_bias, int row0,
                                                  int key0) {
  const Band band{p.band_lo, p.band_hi};
  s.for_each([&](float& x, int, int row, int col) {
    const int key = key0 + col;
    if constexpr (kPrescaled) x *= p.scale;
    if constexpr (kSoftcap) x = Softcap::value_and_slope(p, x).value;
    if constexpr (kKeyBias) x = KeyBias::add(x, !kMasked || key < p.seqlen_k ? key_bias.value(key) : 0.f);
    if constexpr (kMasked) x = key < p.seqlen_k && band.keeps(row0 + row, key) ? x : neg_inf();
  });
}

__device__ __forceinline__ void store_results(const Params& p, Fragment<kMTiles, kTile.value_dim>& o,
                                              const OnlineSoftmax<kMTiles>& softmax, SharedStorage& smem) {
  const Work work = locate_rows(ceil_div(p.seqlen_q, kTile.block_m));
  const BatchIndex batch = batch_index(p, work.owned, 0);
  const int tile_row0 = work.block * kTile.block_m, rows = min_of(kTile.block_m, p.seqlen_q - tile_row0);
  const int warp_row0 = warp_id() * 16 * kMTiles;
  float o_scale[2 * kMTiles], lse[2 * kMTiles];
#pragma unroll
  for (int r = 0; r < 2 * kMTiles; ++r) softmax.finish(r, p.lse_scale, o_scale[r], lse[r]);
  if (p.lse != nullptr && lane_id() % 4 == 0) {  // one lane of the quad that shares the row
    float* lse_gmem = p.lse + offset(p.lse_stride, batch) + (tile_row0 + warp_row0) * p.lse_stride.row;
    Scores::for_each_row([&](int r, int row) {
      if (warp_row0 + row < rows) lse_gmem[row * p.lse_stride.row] = lse[r];
    });
  }
  if (p.value_dim == 0) return;
  o.for_each([&](float& x, int slot, int, int) { x *= o_scale[slot]; });
  store_rows<Output>(o, smem.q, warp_row0, base16(p.o, p.o_stride, batch), p.o_stride, tile_row0, p.seqlen_q,
                     p.value_dim, p.store_vector != 0);
}

__device__ __forceinline__ void attention_forward(const Params& p, SharedStorage& smem) {
  const Work work = locate_rows(ceil_div(p.seqlen_q, kTile.block_m));
  const BatchIndex batch = batch_index(p, work.owned, 0);
  const int tile_row0 = work.block * kTile.block_m, rows = min_of(kTile.block_m, p.seqlen_q - tile_row0);
  const int warp_row0 = warp_id() * 16 * kMTiles;
  const u16* q_gmem = base16(p.q, p.q_stride, batch);
  const u16* k_gmem = base16(p.k, p.k_stride, batch);
  const u16* v_gmem = base16(p.v, p.v_stride, batch);
  const KeyBias key_bias{p.key_bias == nullptr ? nullptr : p.key_bias + offset(p.key_bias_stride, batch),
                         p.key_bias_stride.row};

  const BlockRange blocks = key_blocks(p, tile_row0, tile_row0 + rows, kTile.block_n);
  const bool has_value = p.value_dim > 0;
  const auto load_k = [&](int block) {
    load_tile<kLoad, kThreads>(smem.k, k_gmem, p.k_stride, block * kTile.block_n, p.seqlen_k, p.head_dim);
    copy_commit();
  };
  const auto load_v = [&](int block) {
    load_tile<kLoad, kThreads>(smem.v, v_gmem, p.v_stride, block * kTile.block_n, p.seqlen_k, p.value_dim);
    copy_commit();
  };

  Fragment<kMTiles, kTile.value_dim> o;
  o.clear();
  OnlineSoftmax<kMTiles> softmax(p.exponent_scale);

  const auto step = [&](int block) {
    copy_wait<0>();
    __syncthreads();  // K(block), and Q, have landed for all; nobody reads V of the block before any more
    if (has_value) load_v(block);
    Scores s;
    s.clear();
    gemm_nt<Operand, kTile.head_dim>(s, smem.q, warp_row0, smem.k);
    copy_wait<0>();
    __syncthreads();  // V(block) has landed for all; nobody reads K(block) any more
    if (block > blocks.begin) load_k(block - 1);
    if (blocks.is_full(block)) {
      apply_score_terms<false>(s, p, key_bias, tile_row0 + warp_row0, block * kTile.block_n);
    } else {
      apply_score_terms<true>(s, p, key_bias, tile_row0 + warp_row0, block * kTile.block_n);
    }
    float rescale[2 * kMTiles];
    softmax.update(s, rescale);
    if (!has_value) return;
    o.for_each([&](float& x, int slot, int, int) { x *= rescale[slot]; });
    OperandA<kMTiles, kTile.block_n> p_rmem;
    to_operand<Operand>(p_rmem, s);
    gemm_nn<Operand, kTile.block_n>(o, p_rmem, smem.v);
  };

  if (blocks.end > blocks.begin) {
    load_tile<kLoad, kThreads>(smem.q, q_gmem, p.q_stride, tile_row0, p.seqlen_q, p.head_dim);
    load_k(blocks.end - 1);
  }
  for (int block = blocks.end - 1; block >= blocks.begin; --block) step(block);

  store_results(p, o, softmax, smem);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1) KERNEL(const __grid_constant__ cuflash::Params p) {
  extern __shared__ __align__(128) char smem[];
  cuflash::attention_forward(p, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
