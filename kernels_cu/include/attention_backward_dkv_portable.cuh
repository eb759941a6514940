// Backward, keys: one CTA a tile of keys and its values; query blocks stream by. Each warp owns rows of keys and works
// on transposed scores, so that p^T and ds^T go from accumulators to A operands without leaving registers:
//   s^T = K Q^T,  dp^T = V dO^T,  p = exp(s - lse),  ds = p (dp - delta),  dV += p^T dO,  dK += ds^T Q.
// A CTA sums over the batch axes on which its output was broadcast, in a fixed order: no atomics.
// The unordered form (kHasDq) shares ds between its warps and adds its part of dQ = ds K to a float32 array atomically.
#pragma once
#include "blocks.cuh"
#include "epilogue.cuh"
#include "gemm.cuh"
#include "locate.cuh"
#include "pipeline.cuh"
#include "ptx/red.cuh"
#include "recompute.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps;
constexpr int kMTiles = kTile.block_n / (16 * kTile.warps);
static_assert(kMTiles * 16 * kTile.warps == kTile.block_n, "each warp owns whole 16-row tiles of keys");
static_assert(kTile.block_m % 16 == 0, "p^T is an A operand of whole k steps");
static_assert(kRowPadding % kTile.block_m == 0, "tiles of row vectors load whole");
static_assert(kTile.value_dim <= kTile.head_dim, "dv is staged in k's tile");

struct QueryStage {
  SharedTile<kTile.block_m, kTile.head_dim> q;
  SharedTile<kTile.block_m, kTile.value_dim> dout;
  alignas(16) float lse[kTile.block_m], delta[kTile.block_m];
};
struct OrderedStorage {
  SharedTile<kTile.block_n, kTile.head_dim> k;
  SharedTile<kTile.block_n, kTile.value_dim> v;
  QueryStage stage[kTile.stages];
};
template <int kQueries>  // a template so that a tile without need of ds may be too narrow for it
struct UnorderedStorage : OrderedStorage {
  SharedTile<kTile.block_n, kQueries> ds;  // transposed: rows are keys
};
using SharedStorage = ConditionalType<kHasDq, UnorderedStorage<kTile.block_m>, OrderedStorage>;
static_assert(kDeterministic != kHasDq, "atomic sums come in any order");
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

using Scores = Fragment<kMTiles, kTile.block_m>;  // transposed: rows are keys

// The one that a kernel does not have takes no registers: nothing reads it.
using GradientK = Fragment<kHasDk ? kMTiles : 1, kHasDk ? kTile.head_dim : 8>;
using GradientV = Fragment<kHasDv ? kMTiles : 1, kHasDv ? kTile.value_dim : 8>;

__device__ __forceinline__ void store_gradients(const Params& params, GradientK& dk, GradientV& dv,
                                                const float (&dkey_bias)[2 * kMTiles], SharedStorage& smem) {
  const Work work = locate_keys(ceil_div(params.seqlen_k, kTile.block_n));
  const int key0 = work.block * kTile.block_n, keys = min_of(kTile.block_n, params.seqlen_k - key0);
  const int warp_row0 = warp_id() * 16 * kMTiles;
  const BatchIndex batch = batch_index(params, work.owned, 0);
  if constexpr (kHasDk) {
    if (params.need & kNeedK) {
      dk.for_each([&](float& x, int, int, int) { x *= params.scale; });
      store_rows<Output>(dk, smem.k, warp_row0, base16(params.dk, params.dk_stride, batch), params.dk_stride, key0,
                         params.seqlen_k, params.head_dim, params.store_vector != 0);
    }
    if (kKeyBias && (params.need & kNeedKeyBias)) {
      float* bias_gmem =
          params.dkey_bias + offset(params.dkey_bias_stride, batch) + (key0 + warp_row0) * params.dkey_bias_stride.row;
      Scores::for_each_row([&](int r, int row) {
        const float sum = quad_sum(dkey_bias[r]);
        if (lane_id() % 4 == 0 && warp_row0 + row < keys) bias_gmem[row * params.dkey_bias_stride.row] = sum;
      });
    }
  }
  if constexpr (kHasDv) {
    if (params.need & kNeedV) {
      store_rows<Output>(dv, smem.k, warp_row0, base16(params.dv, params.dv_stride, batch), params.dv_stride, key0,
                         params.seqlen_k, params.value_dim, params.store_vector != 0);
    }
  }
}

// The CTA's part of dQ for one query block: its warps share their ds, then each takes 16 rows and some columns.
// dq_accum is kept in register order, so that each instruction of a warp adds to 128 successive bytes.
template <class Storage>
__device__ __forceinline__ void add_dq(const Params& params, Storage& smem,
                                       const OperandA<kMTiles, kTile.block_m>& ds_rmem, float* dq_gmem, int row0) {
  constexpr int kRowTiles = kTile.block_m / 16, kColumnParts = kTile.warps / kRowTiles;
  static_assert(kRowTiles * kColumnParts == kTile.warps, "the warps divide a block of dq evenly");
  constexpr int kCols = kTile.head_dim / kColumnParts;
  const int tile_row0 = warp_id() % kRowTiles * 16, col0 = warp_id() / kRowTiles * kCols;
  store_operand(ds_rmem, smem.ds, warp_id() * 16 * kMTiles);
  __syncthreads();  // ds of all keys is complete; the barrier before the next block frees it again
  if (row0 + tile_row0 >= params.seqlen_q) return;
  Fragment<1, kCols> dq;
  dq.clear();
#pragma unroll
  for (int k = 0; k < kTile.block_n / 16; ++k) {
    u32 a[1][4];
    load_a_trans(a[0], smem.ds, tile_row0, k);
#pragma unroll
    for (int n = 0; n < kCols / 16; ++n) {
      u32 b[4];
      load_b_trans(b, smem.k, col0 + 16 * n, k);
      mma_pair<Operand>(dq, a, b, 2 * n);
    }
  }
  float* to = dq_gmem + i64(row0 + tile_row0) * kTile.head_dim + col0 * 16;
  dq.for_each_in_order([&](float& x, int index) { red_add(to + index, x); });
}

__device__ __forceinline__ void attention_backward_dkv(const Params& params, SharedStorage& smem) {
  const Work work = locate_keys(ceil_div(params.seqlen_k, kTile.block_n));
  const int key0 = work.block * kTile.block_n, keys = min_of(kTile.block_n, params.seqlen_k - key0);
  const int warp_row0 = warp_id() * 16 * kMTiles;
  const BlockRange blocks = query_blocks(params, key0, key0 + keys, kTile.block_m);
  const bool has_dout = params.dout != nullptr && params.value_dim > 0;
  const bool need_ds = kHasDk && (params.need & (kNeedK | kNeedKeyBias));
  const bool need_dv = kHasDv && has_dout && (params.need & kNeedV);

  GradientK dk;
  GradientV dv;
  dk.clear();
  dv.clear();
  float dkey_bias[2 * kMTiles] = {};

  for (int summed = 0; summed < loop_count(params); ++summed) {
    const BatchIndex batch = batch_index(params, work.owned, summed);
    const u16* q_gmem = base16(params.q, params.q_stride, batch);
    const u16* dout_gmem = base16(params.dout, params.dout_stride, batch);
    const float* lse_gmem = params.row_lse + offset(params.row_lse_stride, batch);
    const float* delta_gmem = params.delta + offset(params.delta_stride, batch);
    float* dq_gmem = params.dq_accum + offset(params.dq_accum_stride, batch);
    const KeyBias key_bias{
        params.key_bias == nullptr ? nullptr : params.key_bias + offset(params.key_bias_stride, batch),
        params.key_bias_stride.row};
    float bias[2 * kMTiles];
    Scores::for_each_row([&](int r, int row) {
      bias[r] = kKeyBias && key0 + warp_row0 + row < params.seqlen_k ? key_bias.value(key0 + warp_row0 + row) : 0.f;
    });

    const auto load_queries = [&](int block) {
      QueryStage& stage = smem.stage[block % kTile.stages];
      const int row0 = block * kTile.block_m;
      load_tile<kLoad, kThreads>(stage.q, q_gmem, params.q_stride, row0, params.seqlen_q, params.head_dim);
      if (has_dout)
        load_tile<kLoad, kThreads>(stage.dout, dout_gmem, params.dout_stride, row0, params.seqlen_q, params.value_dim);
      load_row_vector<kThreads, kTile.block_m>(stage.lse, lse_gmem + row0);
      load_row_vector<kThreads, kTile.block_m>(stage.delta, delta_gmem + row0);
      copy_commit();
    };

    const auto step = [&](int block) {
      const QueryStage& stage = smem.stage[block % kTile.stages];
      Scores s, dp;
      s.clear();
      gemm_nt<Operand, kTile.head_dim>(s, smem.k, warp_row0, stage.q);
      dp.clear();
      if (kHasDk && has_dout && need_ds) gemm_nt<Operand, kTile.value_dim>(dp, smem.v, warp_row0, stage.dout);
      const Band band{params.band_lo, params.band_hi};
      const int row0 = block * kTile.block_m;
      const auto to_p_and_ds = [&](auto masked, auto large) {
        constexpr bool kMasked = decltype(masked)::value, kLarge = decltype(large)::value;
        s.for_each_with(dp, [&](float& s_or_p, float& dp_or_ds, int slot, int row, int col) {
          const ValueAndSlope v = apply_terms(params, s_or_p, bias[slot]);
          const int key = warp_row0 + row;
          const bool seen =
              !kMasked || (key < keys && row0 + col < params.seqlen_q && band.keeps(row0 + col, key0 + key));
          s_or_p = seen ? probability<kLarge>(params, v.value, stage.lse[col]) : 0.f;
          const float ds = s_or_p * (dp_or_ds - stage.delta[col]);
          if constexpr (kHasDk && kKeyBias) dkey_bias[slot] += ds;  // the bias comes after the softcap
          dp_or_ds = ds * v.slope;
        });
      };
      bool large = false;
      for (int i = lane_id(); i < kTile.block_m; i += 32) large |= is_large_lse(stage.lse[i]);
      if (__any_sync(kFullWarp, large)) {
        to_p_and_ds(Flag<true>{}, Flag<true>{});
      } else if (blocks.is_full(block) && keys == kTile.block_n) {
        to_p_and_ds(Flag<false>{}, Flag<false>{});
      } else {
        to_p_and_ds(Flag<true>{}, Flag<false>{});
      }
      if constexpr (kHasDv) {
        if (need_dv) {
          OperandA<kMTiles, kTile.block_m> p_rmem;
          to_operand<Operand>(p_rmem, s);
          gemm_nn<Operand, kTile.block_m>(dv, p_rmem, stage.dout);
        }
      }
      if constexpr (kHasDk) {
        if (need_ds) {
          OperandA<kMTiles, kTile.block_m> ds_rmem;
          to_operand<Operand>(ds_rmem, dp);
          gemm_nn<Operand, kTile.block_m>(dk, ds_rmem, stage.q);
          if constexpr (kHasDq) add_dq(params, smem, ds_rmem, dq_gmem, row0);
        }
      }
    };

    if (blocks.end <= blocks.begin) continue;
    __syncthreads();  // nobody reads the tiles of the batch before any more
    load_tile<kLoad, kThreads>(smem.k, base16(params.k, params.k_stride, batch), params.k_stride, key0, params.seqlen_k,
                               params.head_dim);
    if (kHasDk && has_dout)
      load_tile<kLoad, kThreads>(smem.v, base16(params.v, params.v_stride, batch), params.v_stride, key0,
                                 params.seqlen_k, params.value_dim);
    load_queries(blocks.begin);
    for (int block = blocks.begin; block < blocks.end; ++block) {
      copy_wait<0>();
      __syncthreads();  // this block's stage has landed for all; nobody reads the other stage any more
      if (kTile.stages > 1 && block + 1 < blocks.end) load_queries(block + 1);
      step(block);
      if (kTile.stages == 1 && block + 1 < blocks.end) {
        __syncthreads();  // nobody reads the only stage any more
        load_queries(block + 1);
      }
    }
  }

  if constexpr (kHasDq) __syncthreads();  // nobody reads K any more, where the results are staged
  store_gradients(params, dk, dv, dkey_bias, smem);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::attention_backward_dkv(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
