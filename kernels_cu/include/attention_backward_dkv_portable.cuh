// Backward, keys: one CTA a tile of keys and its values; query blocks stream by. Each warp owns rows of keys and works
// on transposed scores, so that p^T and ds^T go from accumulators to A operands without leaving registers, unless
// several warps share the rows:
//   s^T = K Q^T,  dp^T = V dO^T,  p = exp(s - lse),  ds = p (dp - delta),  dV += p^T dO,  dK += ds^T Q.
// A CTA sums dk and dv over the batch axes on which they were broadcast, in a fixed order: no atomics.
// The fused form (kHasDq) shares ds between its warps and adds its part of dQ = ds K to an array of sums (dq_sums.cuh),
// in turns with the CTAs of other keys or, unless results are to be deterministic, in any order.
// Its form with three stages keeps p and ds twice and has one barrier a step, of two halves: a warp stores ds, arrives,
// multiplies what is its own, and waits for the ds of others only then. Whoever passes it may also read the next
// stage, and write to the stage, p and ds of the step before: every warp arrived after its last use of them.
#pragma once
#include "blocks.cuh"
#include "dq_sums.cuh"
#include "epilogue.cuh"
#include "locate.cuh"
#include "order.cuh"
#include "pipeline.cuh"
#include "product.cuh"
#include "recompute.cuh"
#include "split_barrier.cuh"

namespace cuflash {

constexpr int kMTiles = kTile.block_n / (16 * kRowWarps), kSlots = 2 * kMTiles;
constexpr int kWarpQueries = kTile.block_m / kColumnWarps;
static_assert(kMTiles * 16 * kRowWarps == kTile.block_n, "each warp owns whole 16-row tiles of keys");
static_assert(kTile.block_m % 16 == 0, "p^T is an A operand of whole k steps");
static_assert(kRowPadding % kTile.block_m == 0, "tiles of row vectors load whole");
static_assert(kTile.value_dim == kTile.head_dim, "dv is staged in k's tile");

constexpr bool kOneBarrier = kHasDq && kTile.stages == 3;
constexpr int kBuffers = kOneBarrier ? 2 : 1;  // of p and ds

struct QueryStage {
  Gemm::TileB<kTile.block_m, kTile.head_dim> q;
  Gemm::TileB<kTile.block_m, kTile.value_dim> dout;
  alignas(16) Accumulator lse[kTile.block_m], delta[kTile.block_m];
};
struct Tiles {
  SharedTile<Operand, kTile.block_n, kTile.head_dim> k;
  SharedTile<Operand, kTile.block_n, kTile.value_dim> v;
  QueryStage stage[kTile.stages];
};
// What warps have of the scores and owe each other; transposed: rows are keys. Templates, so that a tile that keeps
// them in registers may be too narrow for them.
template <int kQueries>
struct SharedP {
  SharedTile<Operand, kTile.block_n, kQueries> p[kBuffers];
};
template <int kQueries>
struct SharedDs {
  SharedTile<Operand, kTile.block_n, kQueries> ds[kBuffers];
};
struct SharedRows {
  RowExchange<kTile.block_n> row;
};
// Where the arrays of a batch begin.
struct BatchArrays {
  const Operand *q, *dout;
  i64 row_vector;  // where lse and delta begin, which lie alike
  Accumulator* dq_accum;
  int* dq_turn;
};
struct SharedFused {
  alignas(16) OrderState order;
  BatchArrays batch;
  SplitBarrier complete;  // of one phase a block, whose parity is the block's
};
template <int kWhich>
struct Nothing {};
struct SharedStorage : Tiles,
                       ConditionalType<kShareOperands && kHasDv, SharedP<kTile.block_m>, Nothing<0>>,
                       ConditionalType<(kShareOperands && kHasDk) || kHasDq, SharedDs<kTile.block_m>, Nothing<1>>,
                       ConditionalType<kShareOperands && !kHasDq, SharedRows, Nothing<2>>,
                       ConditionalType<kHasDq, SharedFused, Nothing<3>> {};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

using Scores = Fragment<kMTiles, kWarpQueries>;  // transposed: rows are keys

// The one that a kernel does not have takes no registers: nothing reads it.
using GradientK = Fragment<kHasDk ? kMTiles : 1, kHasDk ? kTile.head_dim / kColumnWarps : 8>;
using GradientV = Fragment<kHasDv ? kMTiles : 1, kHasDv ? kTile.value_dim / kColumnWarps : 8>;

// Sums over the queries of all warps that share the keys.
template <class Storage>
__device__ __forceinline__ void add_over_row(Storage& smem, Accumulator (&x)[kSlots]) {
  if constexpr (kShareOperands && !kHasDq)  // the fused form has no bias
    exchange(smem.row, x, warp_row() * 16 * kMTiles, [](Accumulator a, Accumulator b) { return a + b; });
}

// The keys of this CTA. Looked up again in the epilogue, not held in registers over the main loop.
template <class Storage>
__device__ __forceinline__ Work locate(const Params& params, const Storage& smem) {
  if constexpr (kOrdered) {
    return locate_ordered_keys(params, smem.order.claimed);
  } else {
    return locate_keys(ceil_div(params.seqlen_k, kTile.block_n));
  }
}

__device__ __forceinline__ void store_gradients(const Params& params, GradientK& dk, GradientV& dv,
                                                Accumulator (&dkey_bias)[kSlots], SharedStorage& smem) {
  const Work work = locate(params, smem);
  const int key0 = work.block * kTile.block_n, keys = min_of(kTile.block_n, params.seqlen_k - key0);
  const int warp_row0 = warp_row() * 16 * kMTiles;
  const BatchIndex batch = batch_index(params, work.owned, 0);
  if constexpr (kHasDk) {
    if (params.need & kNeedK) {
      dk.for_each([&](Accumulator& x, int, int, int) { x *= params.scale; });
      store_rows(dk, smem.k, warp_row0, warp_column() * (kTile.head_dim / kColumnWarps),
                 base<Output>(params.dk, params.dk_stride, batch), params.dk_stride, key0, params.seqlen_k,
                 params.head_dim, params.store_vector != 0);
    }
    if (kKeyBias && (params.need & kNeedKeyBias)) {
      Accumulator* bias_gmem = base<Accumulator>(params.dkey_bias, params.dkey_bias_stride, batch) +
                               (key0 + warp_row0) * params.dkey_bias_stride.row;
#pragma unroll
      for (int r = 0; r < kSlots; ++r) dkey_bias[r] = quad_sum(dkey_bias[r]);
      add_over_row(smem, dkey_bias);
      Scores::for_each_row([&](int r, int row) {
        if (lane_id() % 4 == 0 && warp_column() == 0 && warp_row0 + row < keys)
          bias_gmem[row * params.dkey_bias_stride.row] = dkey_bias[r];
      });
    }
  }
  if constexpr (kHasDv) {
    if (params.need & kNeedV) {
      store_rows(dv, smem.k, warp_row0, warp_column() * (kTile.value_dim / kColumnWarps),
                 base<Output>(params.dv, params.dv_stride, batch), params.dv_stride, key0, params.seqlen_k,
                 params.value_dim, params.store_vector != 0);
    }
  }
}

// Work is claimed in the order in which CTAs start: the hardware promises none.
template <class Storage>
__device__ __forceinline__ void claim_work(const Params& params, Storage& smem) {
  if constexpr (kOrdered) {
    if (threadIdx.x == 0) {
      smem.order.claimed = atomicAdd(params.claims, 1);
      smem.order.block = locate_ordered_keys(params, smem.order.claimed).block;
      smem.order.turn = nullptr;
    }
    __syncthreads();  // the claim is known to all
  }
}
template <class Storage>
__device__ __forceinline__ void pass_turn_on(Storage& smem) {
  if constexpr (kOrdered) {
    if (threadIdx.x == 0) pass_turn(smem.order);
  }
}

// Where loads find the arrays. In the fused form, whose registers are all in use, in shared memory, but for doubles:
// with them that spilled.
template <class Storage>
__device__ __forceinline__ BatchArrays batch_arrays(const Storage& smem, const BatchArrays& own) {
  if constexpr (kHasDq && sizeof(Accumulator) == 4) {
    return smem.batch;
  } else {
    return own;
  }
}
template <class Storage>
__device__ __forceinline__ void begin_batch(Storage& smem, const BatchArrays& arrays, int first_block, bool again) {
  if constexpr (kHasDq) {
    if (threadIdx.x == 0) {
      smem.batch = arrays;
      if constexpr (kOneBarrier) smem.complete.start(again);
    }
    __syncthreads();  // both are known to all
    if constexpr (kOneBarrier) {
      if (first_block % 2 != 0)
        smem.complete.arrive(), smem.complete.wait(0);  // the phase of a block has its parity; each is waited for
    }
  }
}

__device__ __forceinline__ void attention_backward_dkv(const Params& params, SharedStorage& smem) {
  claim_work(params, smem);
  const Work work = locate(params, smem);
  const int key0 = work.block * kTile.block_n, keys = min_of(kTile.block_n, params.seqlen_k - key0);
  const int warp_row0 = warp_row() * 16 * kMTiles, warp_query0 = warp_column() * kWarpQueries;
  const BlockRange blocks = query_blocks(params, key0, key0 + keys, kTile.block_m);
  // The fused form is launched for all gradients at once.
  const bool has_dout = kHasDq || (params.dout != nullptr && params.value_dim > 0);
  const bool need_ds = kHasDq || (kHasDk && (params.need & (kNeedK | kNeedKeyBias)));
  const bool need_dv = kHasDq || (kHasDv && has_dout && (params.need & kNeedV));

  GradientK dk;
  GradientV dv;
  dk.clear();
  dv.clear();
  Accumulator dkey_bias[kSlots] = {};
  const Exp2 exp2(lane_id());

  for (int summed = 0; summed < loop_count(params); ++summed) {
    const BatchIndex batch = batch_index(params, work.owned, summed);
    const BatchArrays own{base<Operand>(params.q, params.q_stride, batch),
                          base<Operand>(params.dout, params.dout_stride, batch), offset(params.row_lse_stride, batch),
                          params.dq_accum + offset(params.dq_accum_stride, batch),
                          params.dq_turn + offset(params.dq_turn_stride, batch)};
    const KeyBias key_bias{
        params.key_bias == nullptr ? nullptr : params.key_bias + offset(params.key_bias_stride, batch),
        params.key_bias_stride.row};
    Accumulator bias[kSlots];
    Scores::for_each_row([&](int r, int row) {
      bias[r] = kKeyBias && key0 + warp_row0 + row < params.seqlen_k ? key_bias.value(key0 + warp_row0 + row) : 0;
    });

    const auto load_queries = [&](int block) {
      QueryStage& stage = smem.stage[block % kTile.stages];
      const BatchArrays from = batch_arrays(smem, own);
      const int row0 = block * kTile.block_m;
      load_tile<kLoad, kThreads>(stage.q, from.q, params.q_stride, row0, params.seqlen_q, params.head_dim);
      if (has_dout)
        load_tile<kLoad, kThreads>(stage.dout, from.dout, params.dout_stride, row0, params.seqlen_q, params.value_dim);
      load_row_vector<kThreads, kTile.block_m>(stage.lse, params.row_lse + from.row_vector + row0);
      load_row_vector<kThreads, kTile.block_m>(stage.delta, params.delta + from.row_vector + row0);
      copy_commit();
    };
    // What this thread has copied is in its place: after the next barrier others may read it.
    const auto land_queries = [&](int block) {
      copy_wait<0>();
      Gemm::prepare<kThreads>(smem.stage[block % kTile.stages].q);
      if (has_dout) Gemm::prepare<kThreads>(smem.stage[block % kTile.stages].dout);
    };

    // Once s is p and dp is ds: the products of the step that sum them over queries, and over keys.
    const auto finish_step = [&](const Scores& p, const Scores& ds, int block, auto& smem) {
      const QueryStage& stage = smem.stage[block % kTile.stages];
      const int buffer = block % kBuffers;
      if constexpr (kShareOperands && kHasDv) store_scores(p, smem.p[buffer]);
      if constexpr ((kShareOperands && kHasDk) || kHasDq) store_scores(ds, smem.ds[buffer]);
      if constexpr (kOneBarrier) {
        land_queries(block + 1);  // of the last block, whose next stage nobody reads, too
        smem.complete.arrive();
        if constexpr (kShareOperands) sync_row();  // p and ds of these rows are complete
      } else if constexpr (kShareOperands || kHasDq) {
        __syncthreads();  // complete; the barrier before the next step frees them
      }
      if constexpr (kHasDv && kShareOperands) {
        if (need_dv) accumulate(dv, smem.p[buffer], stage.dout);
      } else if constexpr (kHasDv) {
        if (need_dv) accumulate(dv, p, stage.dout);
      }
      if constexpr (kHasDq && !kOneBarrier) add_dq(params, smem, smem.ds[buffer], block);
      if constexpr (kHasDk && kShareOperands) {
        if (need_ds) accumulate(dk, smem.ds[buffer], stage.q);
      } else if constexpr (kHasDk) {
        if (need_ds) accumulate(dk, ds, stage.q);
      }
      if constexpr (kOneBarrier) {
        smem.complete.wait(block % 2);  // ds of all rows is complete; so is the next stage, and the one before is free
        pass_turn_on(smem);
        if (block + 2 < blocks.end) load_queries(block + 2);
        add_dq(params, smem, smem.ds[buffer], block);
      }
    };

    const auto step = [&](int block) {
      const QueryStage& stage = smem.stage[block % kTile.stages];
      Scores s, dp;
      s.clear();
      Gemm::nt<kTile.head_dim>(s, smem.k, warp_row0, stage.q, warp_query0);
      dp.clear();
      if (kHasDk && has_dout && need_ds) Gemm::nt<kTile.value_dim>(dp, smem.v, warp_row0, stage.dout, warp_query0);
      const Band band{params.band_lo, params.band_hi};
      const int row0 = block * kTile.block_m;
      const auto to_p_and_ds = [&](auto masked, auto large) {
        constexpr bool kMasked = decltype(masked)::value, kLarge = decltype(large)::value;
        s.for_each_with(dp, [&](Accumulator& s_or_p, Accumulator& dp_or_ds, int slot, int row, int warp_col) {
          const int col = warp_query0 + warp_col;
          const ValueAndSlope v = apply_terms(params, s_or_p, bias[slot]);
          const int key = warp_row0 + row;
          bool seen = true;
          if constexpr (kMasked && kHasDq) {  // no branches: they cost registers here, and save some in other kernels
            seen = (key < keys) & (row0 + col < params.seqlen_q) & band.keeps(row0 + col, key0 + key);
          } else if constexpr (kMasked) {
            seen = key < keys && row0 + col < params.seqlen_q && band.keeps(row0 + col, key0 + key);
          }
          const Accumulator p = probability<kLarge>(params, exp2, v.value, stage.lse[col]);  // by whole warps
          s_or_p = seen ? p : 0;
          const Accumulator ds = s_or_p * (dp_or_ds - stage.delta[col]);
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
      finish_step(s, dp, block, smem);
    };

    if (blocks.end <= blocks.begin) continue;
    __syncthreads();  // nobody reads the tiles of the batch before any more
    pass_turn_on(smem);
    begin_batch(smem, own, blocks.begin, summed > 0);
    load_tile<kLoad, kThreads>(smem.k, base<Operand>(params.k, params.k_stride, batch), params.k_stride, key0,
                               params.seqlen_k, params.head_dim);
    if (kHasDk && has_dout)
      load_tile<kLoad, kThreads>(smem.v, base<Operand>(params.v, params.v_stride, batch), params.v_stride, key0,
                                 params.seqlen_k, params.value_dim);
    if constexpr (kOneBarrier) {
#pragma unroll 1  // one piece of code: fewer registers
      for (int block = blocks.begin; block < min_of(blocks.begin + 2, blocks.end); ++block) load_queries(block);
      land_queries(blocks.begin);
      __syncthreads();  // the first stage has landed for all
      for (int block = blocks.begin; block < blocks.end; ++block) step(block);
      continue;
    }
    load_queries(blocks.begin);
    for (int block = blocks.begin; block < blocks.end; ++block) {
      land_queries(block);
      __syncthreads();  // this block's stage has landed for all; nobody reads the other stage any more
      pass_turn_on(smem);
      if (kTile.stages > 1 && block + 1 < blocks.end) load_queries(block + 1);
      step(block);
      if (kTile.stages == 1 && block + 1 < blocks.end) {
        __syncthreads();  // nobody reads the only stage any more
        load_queries(block + 1);
      }
    }
  }

  if constexpr (kHasDq || kShareOperands) __syncthreads();  // nobody reads K any more, where the results are staged
  pass_turn_on(smem);
  store_gradients(params, dk, dv, dkey_bias, smem);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::attention_backward_dkv(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
