// Backward, queries: one CTA a tile of query rows, key blocks stream by, as in the forward:
//   s = Q K^T,  dp = dO V^T,  p = exp(s - lse),  ds = p (dp - delta),  dQ += ds K.
// A CTA sums over the batch axes on which q was broadcast, in a fixed order: no atomics.
#pragma once
#include "blocks.cuh"
#include "epilogue.cuh"
#include "locate.cuh"
#include "pipeline.cuh"
#include "product.cuh"
#include "recompute.cuh"

namespace cuflash {

constexpr int kMTiles = kTile.block_m / (16 * kRowWarps), kSlots = 2 * kMTiles;
constexpr int kWarpKeys = kTile.block_n / kColumnWarps, kWarpFeatures = kTile.head_dim / kColumnWarps;
static_assert(kMTiles * 16 * kRowWarps == kTile.block_m, "each warp owns whole 16-row tiles");
static_assert(kRowPadding % kTile.block_m == 0, "tiles of row vectors load whole");

struct KeyStage {
  Gemm::TileB<kTile.block_n, kTile.head_dim> k;
  Gemm::TileB<kTile.block_n, kTile.value_dim> v;
};
struct PrivateStorage {
  SharedTile<Operand, kTile.block_m, kTile.head_dim> q;
  SharedTile<Operand, kTile.block_m, kTile.value_dim> dout;
  KeyStage stage[kTile.stages];
};
template <int kKeys>  // a template so that a tile that keeps ds in registers may be too narrow for it
struct SharingStorage : PrivateStorage {
  SharedTile<Operand, kTile.block_m, kKeys> ds;
};
using SharedStorage = ConditionalType<kShareOperands, SharingStorage<kTile.block_n>, PrivateStorage>;
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

using Scores = Fragment<kMTiles, kWarpKeys>;
using GradientQ = Fragment<kMTiles, kWarpFeatures>;

// dq += ds k.
template <class Storage>
__device__ __forceinline__ void accumulate_dq(GradientQ& dq, const Scores& ds, Storage& smem, const KeyStage& stage) {
  if constexpr (kShareOperands) {
    store_scores(ds, smem.ds);
    __syncthreads();  // ds of all keys is complete; the barrier of the next step frees it again
    accumulate(dq, smem.ds, stage.k);
  } else {
    accumulate(dq, ds, stage.k);
  }
}

__device__ __forceinline__ void store_dq(const Params& params, GradientQ& dq, SharedStorage& smem) {
  const Work work = locate_rows(ceil_div(params.seqlen_q, kTile.block_m));
  dq.for_each([&](Accumulator& x, int, int, int) { x *= params.scale; });
  store_rows(dq, smem.q, warp_row() * 16 * kMTiles, warp_column() * kWarpFeatures,
             base<Output>(params.dq, params.dq_stride, batch_index(params, work.owned, 0)), params.dq_stride,
             work.block * kTile.block_m, params.seqlen_q, params.head_dim, params.store_vector != 0);
}

__device__ __forceinline__ void attention_backward_dq(const Params& params, SharedStorage& smem) {
  const Work work = locate_rows(ceil_div(params.seqlen_q, kTile.block_m));
  const int tile_row0 = work.block * kTile.block_m, rows = min_of(kTile.block_m, params.seqlen_q - tile_row0);
  const int warp_row0 = warp_row() * 16 * kMTiles, warp_key0 = warp_column() * kWarpKeys;
  const BlockRange blocks = key_blocks(params, tile_row0, tile_row0 + rows, kTile.block_n);
  const bool has_dout = params.dout != nullptr && params.value_dim > 0;

  GradientQ dq;
  dq.clear();
  const Exp2 exp2(lane_id());

  for (int summed = 0; summed < loop_count(params); ++summed) {
    const BatchIndex batch = batch_index(params, work.owned, summed);
    const Operand* k_gmem = base<Operand>(params.k, params.k_stride, batch);
    const Operand* v_gmem = base<Operand>(params.v, params.v_stride, batch);
    const KeyBias key_bias{
        params.key_bias == nullptr ? nullptr : params.key_bias + offset(params.key_bias_stride, batch),
        params.key_bias_stride.row};
    Accumulator lse[kSlots], delta[kSlots];
    bool row_large = false;
    Scores::for_each_row([&](int r, int row) {  // rows beyond the length exist in the padded workspace
      lse[r] = (params.row_lse + offset(params.row_lse_stride, batch))[tile_row0 + warp_row0 + row];
      delta[r] = (params.delta + offset(params.delta_stride, batch))[tile_row0 + warp_row0 + row];
      row_large |= is_large_lse(lse[r]);
    });
    const bool any_large = __any_sync(kFullWarp, row_large);

    const auto load_keys = [&](int block) {
      KeyStage& stage = smem.stage[block % kTile.stages];
      const int key0 = block * kTile.block_n;
      load_tile<kLoad, kThreads>(stage.k, k_gmem, params.k_stride, key0, params.seqlen_k, params.head_dim);
      if (has_dout)
        load_tile<kLoad, kThreads>(stage.v, v_gmem, params.v_stride, key0, params.seqlen_k, params.value_dim);
      copy_commit();
    };

    const auto step = [&](int block) {
      const KeyStage& stage = smem.stage[block % kTile.stages];
      Scores s, dp;
      s.clear();
      Gemm::nt<kTile.head_dim>(s, smem.q, warp_row0, stage.k, warp_key0);
      dp.clear();
      if (has_dout) Gemm::nt<kTile.value_dim>(dp, smem.dout, warp_row0, stage.v, warp_key0);
      const Band band{params.band_lo, params.band_hi};
      const int key0 = block * kTile.block_n + warp_key0, row0 = tile_row0 + warp_row0;
      const auto to_ds = [&](auto masked, auto large) {
        constexpr bool kMasked = decltype(masked)::value, kLarge = decltype(large)::value;
        s.for_each_with(dp, [&](Accumulator& x, Accumulator& dp_or_ds, int slot, int row, int col) {
          const int key = key0 + col;
          const bool exists = !kMasked || key < params.seqlen_k;
          const ValueAndSlope v = apply_terms(params, x, kKeyBias && exists ? key_bias.value(key) : 0);
          const bool seen = !kMasked || (exists && band.keeps(row0 + row, key));
          const Accumulator p = probability<kLarge>(params, exp2, v.value, lse[slot]);  // by whole warps
          dp_or_ds = (seen ? p : 0) * (dp_or_ds - delta[slot]) * v.slope;
        });
      };
      if (any_large) {
        to_ds(Flag<true>{}, Flag<true>{});
      } else if (blocks.is_full(block)) {
        to_ds(Flag<false>{}, Flag<false>{});
      } else {
        to_ds(Flag<true>{}, Flag<false>{});
      }
      accumulate_dq(dq, dp, smem, stage);
    };

    if (blocks.end <= blocks.begin) continue;
    __syncthreads();  // nobody reads the tiles of the batch before any more
    load_tile<kLoad, kThreads>(smem.q, base<Operand>(params.q, params.q_stride, batch), params.q_stride, tile_row0,
                               params.seqlen_q, params.head_dim);
    if (has_dout)
      load_tile<kLoad, kThreads>(smem.dout, base<Operand>(params.dout, params.dout_stride, batch), params.dout_stride,
                                 tile_row0, params.seqlen_q, params.value_dim);
    load_keys(blocks.end - 1);
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      copy_wait<0>();
      Gemm::prepare<kThreads>(smem.stage[block % kTile.stages].k);
      if (has_dout) Gemm::prepare<kThreads>(smem.stage[block % kTile.stages].v);
      __syncthreads();  // this block's stage has landed for all; nobody reads the other stage any more
      if (kTile.stages > 1 && block > blocks.begin) load_keys(block - 1);
      step(block);
      if (kTile.stages == 1 && block > blocks.begin) {
        __syncthreads();  // nobody reads the only stage any more
        load_keys(block - 1);
      }
    }
  }

  store_dq(params, dq, smem);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::attention_backward_dq(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
