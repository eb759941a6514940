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
__device__ __forceinline__ void apply_score_terms(Scores& s, const Params& params, const KeyBias& key_bias, int row0,
                                                  int key0) {
  const Band band{params.band_lo, params.band_hi};
  s.for_each([&](float& x, int, int row, int col) {
    const int key = key0 + col;
    const bool exists = !kMasked || key < params.seqlen_k;
    x = apply_terms(params, x, kKeyBias && exists ? key_bias.value(key) : 0.f).value;
    if constexpr (kMasked) x = exists && band.keeps(row0 + row, key) ? x : neg_inf();
  });
}

__device__ __forceinline__ void store_results(const Params& params, Fragment<kMTiles, kTile.value_dim>& o,
                                              const OnlineSoftmax<kMTiles>& softmax, SharedStorage& smem) {
  const Work work = locate_rows(ceil_div(params.seqlen_q, kTile.block_m));
  const BatchIndex batch = batch_index(params, work.owned, 0);
  const int tile_row0 = work.block * kTile.block_m, rows = min_of(kTile.block_m, params.seqlen_q - tile_row0);
  const int warp_row0 = warp_id() * 16 * kMTiles;
  float o_scale[2 * kMTiles], lse[2 * kMTiles];
#pragma unroll
  for (int r = 0; r < 2 * kMTiles; ++r) softmax.finish(r, params.lse_scale, o_scale[r], lse[r]);
  if (params.lse != nullptr && lane_id() % 4 == 0) {  // one lane of the quad that shares the row
    float* lse_gmem = params.lse + offset(params.lse_stride, batch) + (tile_row0 + warp_row0) * params.lse_stride.row;
    Scores::for_each_row([&](int r, int row) {
      if (warp_row0 + row < rows) lse_gmem[row * params.lse_stride.row] = lse[r];
    });
  }
  if (params.value_dim == 0) return;
  o.for_each([&](float& x, int slot, int, int) { x *= o_scale[slot]; });
  store_rows<Output>(o, smem.q, warp_row0, base16(params.o, params.o_stride, batch), params.o_stride, tile_row0,
                     params.seqlen_q, params.value_dim, params.store_vector != 0);
}

__device__ __forceinline__ void attention_forward(const Params& params, SharedStorage& smem) {
  const Work work = locate_rows(ceil_div(params.seqlen_q, kTile.block_m));
  const BatchIndex batch = batch_index(params, work.owned, 0);
  const int tile_row0 = work.block * kTile.block_m, rows = min_of(kTile.block_m, params.seqlen_q - tile_row0);
  const int warp_row0 = warp_id() * 16 * kMTiles;
  const u16* q_gmem = base16(params.q, params.q_stride, batch);
  const u16* k_gmem = base16(params.k, params.k_stride, batch);
  const u16* v_gmem = base16(params.v, params.v_stride, batch);
  const KeyBias key_bias{params.key_bias == nullptr ? nullptr : params.key_bias + offset(params.key_bias_stride, batch),
                         params.key_bias_stride.row};

  const BlockRange blocks = key_blocks(params, tile_row0, tile_row0 + rows, kTile.block_n);
  const bool has_value = params.value_dim > 0;
  const auto load_k = [&](int block) {
    load_tile<kLoad, kThreads>(smem.k, k_gmem, params.k_stride, block * kTile.block_n, params.seqlen_k,
                               params.head_dim);
    copy_commit();
  };
  const auto load_v = [&](int block) {
    load_tile<kLoad, kThreads>(smem.v, v_gmem, params.v_stride, block * kTile.block_n, params.seqlen_k,
                               params.value_dim);
    copy_commit();
  };

  Fragment<kMTiles, kTile.value_dim> o;
  o.clear();
  OnlineSoftmax<kMTiles> softmax(params.exponent_scale);

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
      apply_score_terms<false>(s, params, key_bias, tile_row0 + warp_row0, block * kTile.block_n);
    } else {
      apply_score_terms<true>(s, params, key_bias, tile_row0 + warp_row0, block * kTile.block_n);
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
    load_tile<kLoad, kThreads>(smem.q, q_gmem, params.q_stride, tile_row0, params.seqlen_q, params.head_dim);
    load_k(blocks.end - 1);
  }
  for (int block = blocks.end - 1; block >= blocks.begin; --block) step(block);

  store_results(params, o, softmax, smem);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
