// Forward for sm_90a: a producer warp has K and V brought by the copy engine, warpgroups multiply by wgmma, and the
// softmax of a block runs under the products of its neighbours. CTAs stay and take one tile of query rows after
// another.
//
// The outline is host.py's: locate; key blocks; load Q; step; finish; epilogue.
#include "gemm_sm90.cuh"
#include "blocks.cuh"
#include "epilogue.cuh"
#include "locate.cuh"
#include "mask.cuh"
#include "pipeline_sm90.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "softmax.cuh"
#include "store_direct.cuh"
#include "terms_sm90.cuh"

namespace cuflash {

constexpr int kConsumers = kTile.warps / 4 - 1, kStages = kTile.stages, kQStages = kTile.q_stages;
static_assert(kTile.block_m == 64 * kConsumers, "each consumer warpgroup has 64 rows");
constexpr bool kHasValue = kTile.value_dim > 0;  // or lse alone
// Sums of three planes stay in the tensor cores for one block: those cut off what ordinary additions round.
constexpr bool kFreshSums = kPlanes == 3;
// These fill the registers, and their products last so long that the other warpgroup's softmax runs under them anyway.
constexpr bool kOverlaps = !kFreshSums && kHasValue;
// With a second Q, the first scores of a tile are formed under the last output and the epilogue of the one before.
constexpr bool kCrossTiles = kQStages == 2;
// Few features: the exponentials take as long as the products. Warpgroups issue theirs in turns, so that the softmax of
// one runs under the products of another.
constexpr bool kTakeTurns = kOverlaps && kPlanes == 1 && (kTile.head_dim <= 64 || kSoftcap || kKeyBias);
// The scale is part of the terms, not of the exponent, where key_bias is: of softcap alone the cap is there.
static_assert(kPrescaled == (kSoftcap || kKeyBias));
static_assert(kOverlaps || !kCrossTiles, "the registers of scores in flight");
// A CTA claims its next tile when so many blocks of this one are still to be copied: early enough to be answered in
// time, and late, as what it claims waits for all that it has before.
constexpr int kBlocksAfterClaim = 2;
// Buffers of key_bias, of which warps are done later than of K.
constexpr int kBiasStages = 4;

// The last blocks of a tile may be beyond what the rows of a warpgroup see: it leaves those out. Where a second Q has
// products in flight at that time, blocks have as many keys as tiles have rows, and there are none.
constexpr bool kLeavesOut = kOverlaps && !kCrossTiles;
static_assert(!kLeavesOut || kTile.block_m - 64 <= kStages * kTile.block_n,
              "V of what is left out waits in its buffers");

using QTile = PanelTile<kTile.block_m, kTile.head_dim>;
using KTile = PanelTile<kTile.block_n, kTile.head_dim>;
struct NoTile {};
// Where there are no values the narrowest rows stand in their place, of which nothing is made.
constexpr int kValueDim = kHasValue ? kTile.value_dim : 64;
using VTile = ConditionalType<kHasValue, PanelTile<kTile.block_n, kValueDim>, NoTile>;
using Scores = Fragment<1, kTile.block_n>;
using OutputRows = Fragment<1, kValueDim>;
using StagedRows = PanelTile<kTile.block_m, kValueDim>;  // o, which is as wide as a plane where it is staged

// A tile of query rows, and the key blocks that they see.
struct TileWork {
  int row0, rows;
  BatchIndex batch;
  BlockRange blocks;

  TileWork() = default;
  __device__ __forceinline__ TileWork(const Params& params, int tile) {
    const Work work = locate_section_rows(params, ceil_div(params.seqlen_q, kTile.block_m), tile);
    row0 = work.block * kTile.block_m;
    rows = min_of(kTile.block_m, params.seqlen_q - row0);
    batch = batch_index(params, work.owned, 0);
    blocks = key_blocks(params, row0, row0 + rows, kTile.block_n);
  }
  __device__ __forceinline__ bool has_keys() const { return blocks.end > blocks.begin; }
};

struct SharedStorage {
  Planes<QTile> q[kQStages];
  Planes<KTile> k[kStages];
  Planes<VTile> v[kStages];
  BlockBias<kTile.block_n> key_bias[kBiasStages];
  BufferBarriers q_barriers[kQStages], k_barriers[kStages], v_barriers[kStages], bias_barriers[kBiasStages];
  const float* key_bias_row;  // the producer's: of the tile's batch position
  TileWork work[kQStages];    // whose Q is in the buffer; of no rows after the last
  TileWork next;              // the producer's
  ConditionalType<kCrossTiles, StagedRows, NoTile> o;
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

__device__ __forceinline__ int tile_count(const Params& params) {
  return ceil_div(params.seqlen_q, kTile.block_m) * owned_count(params);
}

// One thread. The order is the consumers': V of a block after K of the next, which with a second Q may be the next
// tile's.
__device__ __forceinline__ void produce(const TmaParams& tma, SharedStorage& smem) {
  const Params& params = tma.params;
  const Strides& q_stride = kPlanes > 1 ? params.q_planes_stride : params.q_stride;
  const Strides& k_stride = kPlanes > 1 ? params.k_planes_stride : params.k_stride;
  const Strides& v_stride = kPlanes > 1 ? params.v_planes_stride : params.v_stride;
  const int tiles = tile_count(params);
  // There are as many claims as tiles, since each CTA's first is its own and its last claim is in vain: so the count is
  // back at 0 in the end, for the next launch.
  const auto tile_after = [&](int tile) {
    return int(gridDim.x) + (params.claims == nullptr ? tile : int(atomicInc(params.claims, tiles - 1)));
  };
  int tile = blockIdx.x;
  // The first tile from this one on that sees keys, to smem.next; or returns false after the last.
  const auto find_tile = [&] {
    for (; tile < tiles; tile = tile_after(tile)) {
      const TileWork work(params, tile);
      smem.next = work;
      if (work.has_keys()) return true;
    }
    return false;
  };
  // While copies are under way: claims and divisions take their time.
  const auto find_next_tile = [&] {
    tile = tile_after(tile);
    return find_tile();
  };
  PipelineState<kQStages> q;
  PipelineState<kStages> k, v;
  PipelineState<kBiasStages> bias;
  BatchIndex v_batch;
  int v_row = -1;  // of the block whose V is due, or -1
  const auto fill_v = [&] {
    if constexpr (kHasValue) {
      if (v_row < 0) return;
      fill(smem.v[v.stage], smem.v_barriers[v.stage], v.parity, tma.v, v_row, v_batch, v_stride);
      v.next();
      v_row = -1;
    }
  };
  bool more = find_tile();
  while (more) {
    const BatchIndex batch = smem.next.batch;
    const int begin = smem.next.blocks.begin;
    int block = smem.next.blocks.end;
    if constexpr (kKeyBias) smem.key_bias_row = params.key_bias + offset(params.key_bias_stride, batch);
    const auto fill_k = [&] {
      --block;
      if (kKeyBias && params.key_bias != nullptr) {
        fill_bias(smem.key_bias[bias.stage].bias, smem.bias_barriers[bias.stage], bias.parity, params,
                  *static_cast<const float* volatile*>(&smem.key_bias_row), block * kTile.block_n);
        bias.next();
      }
      fill(smem.k[k.stage], smem.k_barriers[k.stage], k.parity, tma.k, block * kTile.block_n, batch, k_stride);
      k.next();
    };
    const auto fill_q = [&] {
      mbarrier_wait(smem.q_barriers[q.stage].empty, q.parity ^ 1);
      smem.work[q.stage] = smem.next;
      fill(smem.q[q.stage], smem.q_barriers[q.stage], q.parity, tma.q, smem.next.row0, batch, q_stride);
      q.next();
    };
    if constexpr (kCrossTiles) fill_q();
    fill_k();
    if constexpr (!kCrossTiles) fill_q();  // its buffer is the last to become empty
    const int claims_at = max_of(2, block + 1 - begin - kBlocksAfterClaim);
    int filled = 1;
    for (;; ++filled) {
      fill_v();
      v_batch = batch, v_row = block * kTile.block_n;
      if (filled == claims_at) more = find_next_tile();
      if (block == begin) break;
      fill_k();
    }
    if (filled == 1) more = find_next_tile();
    if constexpr (!kCrossTiles) fill_v();
  }
  fill_v();
  mbarrier_wait(smem.q_barriers[q.stage].empty, q.parity ^ 1);
  smem.work[q.stage].rows = 0;
  mbarrier_arrive(smem.q_barriers[q.stage].full);
}

// The consumers are warpgroups 1 to kConsumers: as many barriers of one, then as many of a turn.
__device__ __forceinline__ int warpgroup() { return threadIdx.x / 128; }
__device__ __forceinline__ bool leads_warpgroup() { return threadIdx.x % 128 == 0; }
__device__ __forceinline__ void warpgroup_sync() { barrier_sync<128>(warpgroup()); }
__device__ __forceinline__ void take_turn() {
  if constexpr (kTakeTurns) barrier_sync<256>(kConsumers + warpgroup());
}
__device__ __forceinline__ void pass_turn() {
  if constexpr (kTakeTurns) barrier_arrive<256>(kConsumers + 1 + warpgroup() % kConsumers);
}

__device__ __forceinline__ void finish_o(const Params& params, const BatchIndex& batch, int row0, OutputRows& o,
                                         const OnlineSoftmax<1>& softmax) {
  const Accumulator sum[2] = {quad_sum(softmax.row_sum[0]), quad_sum(softmax.row_sum[1])};
  finish_rows(o, softmax, sum, params, batch, row0, true);
}

// Rounds o of the warp's rows, from row0 of the tile on, and has the copy engine write it, by way of shared memory:
// less is left to do here for warps whose next scores are on their way.
__device__ __forceinline__ void store_by_copy(const TmaParams& tma, const BatchIndex& batch, int tile_row0, int row0,
                                              const OutputRows& o, StagedRows& staged) {
  if (lane_id() == 0) tma_store_wait_read();  // of the tile before
  __syncwarp();
  store_fragment(o, staged, row0, 0);
  fence_async_proxy();  // the copy engine is to see it
  __syncwarp();
  if (lane_id() != 0) return;
  int at[3];
  batch_on_map(at, batch, tma.params.o_stride);
#pragma unroll
  for (int panel = 0; panel < StagedRows::kChunks / 8; ++panel)
    tma_store(tma.o, staged.address(row0, panel * 8 * StagedRows::kChunk), panel * 8 * StagedRows::kChunk,
              tile_row0 + row0, at);
  tma_store_commit();
}

__device__ __forceinline__ void store_o(const Params& params, const BatchIndex& batch, int row0, const OutputRows& o) {
  if constexpr (kHasValue)
    store_rows_direct(o, base<Output>(params.o, params.o_stride, batch), params.o_stride, row0, params.seqlen_q,
                      params.value_dim, params.store_vector != 0);
}

// Tiles of which no row sees a key, which nobody has loaded anything for.
__device__ __forceinline__ void store_empty_tiles(const Params& params, int warp_row0) {
  const bool rows_see_keys = params.band_hi >= 0 && params.seqlen_q - 1 + params.band_lo < params.seqlen_k;
  if (rows_see_keys) return;
  for (int tile = blockIdx.x; tile < tile_count(params); tile += gridDim.x) {
    const TileWork work(params, tile);
    if (work.has_keys()) continue;
    OutputRows o;
    o.clear();
    finish_o(params, work.batch, work.row0 + warp_row0, o, OnlineSoftmax<1>(params.exponent_scale));
    store_o(params, work.batch, work.row0 + warp_row0, o);
  }
}

// One warpgroup, 64 rows of each tile.
__device__ __forceinline__ void consume(const TmaParams& tma, SharedStorage& smem) {
  const Params& params = tma.params;
  const int group_row0 = (warpgroup() - 1) * 64, warp_row0 = group_row0 + warp_id() % 4 * 16;
  const auto release = [](u64& empty) {
    if (leads_warpgroup()) mbarrier_arrive(empty);
  };
  PipelineState<kQStages> q;
  PipelineState<kStages> k, v;
  PipelineState<kBiasStages> bias;
  Scores s;
  const float tangent_factor = kSoftcap ? Tangent::factor(params) : 0;
  const auto issue_scores = [&] { issue_nt<kTile.head_dim>(s, smem.q[q.stage], group_row0, smem.k[k.stage]); };
  const auto release_bias = [&] {
    __syncwarp();  // all lanes have read it
    if (lane_id() == 0) mbarrier_arrive(smem.bias_barriers[bias.stage].empty);
    bias.next();
  };
  BlockRange blocks;
  int left_out = 0;  // of which V is still to be given up
  // Whether there is a next tile, whose Q then is there. Its first scores are issued in any case: under a condition,
  // the compiler would wait for each of their products. After the last tile they are of what lies in shared memory, and
  // nobody looks.
  const auto start_tile = [&] {
    mbarrier_wait(smem.q_barriers[q.stage].full, q.parity);
    const TileWork& work = smem.work[q.stage];
    const bool is_tile = work.rows > 0;
    if (is_tile) {
      blocks = work.blocks;
      if constexpr (kLeavesOut) {
        // The compiler is to see that warps do not part: it then keeps stages in uniform registers.
        const int first = work.row0 + __shfl_sync(kFullWarp, group_row0, 0), tile_begin = blocks.begin,
                  tile_end = blocks.end;
        blocks = key_blocks(params, first, first + 64, kTile.block_n);
        blocks.begin = tile_begin;
        blocks.end = min_of(tile_end, max_of(tile_begin + 1, blocks.end));
        for (left_out = 0; left_out < tile_end - blocks.end; ++left_out) {
          mbarrier_wait(smem.k_barriers[k.stage].full, k.parity);
          take_turn();
          pass_turn();
          warpgroup_sync();  // nobody waits any more
          release(smem.k_barriers[k.stage].empty);
          k.next();
          if (kKeyBias && params.key_bias != nullptr) release_bias();
        }
      }
    }
    if constexpr (kOverlaps) {
      if (is_tile) mbarrier_wait(smem.k_barriers[k.stage].full, k.parity);
      issue_scores();
    }
    return is_tile;
  };

  if (warpgroup() == kConsumers) pass_turn();  // the first begins
  bool is_tile = start_tile();
  while (is_tile) {
    const int row0 = smem.work[q.stage].row0 + warp_row0;
    OutputRows o;
    OnlineSoftmax<1> softmax(params.exponent_scale);
    OperandA<kTile.block_n> p;
    OutputRows fresh;  // or unused
    OutputRows& sums = kFreshSums ? fresh : o;
    bool begins = true;
    int block = blocks.end - 1;
    Accumulator rescale[2];

    const auto issue_output = [&] {
      if constexpr (kHasValue) {
        mbarrier_wait(smem.v_barriers[v.stage].full, v.parity);
        issue_nn(sums, p, smem.v[v.stage], kFreshSums || begins);
      }
    };
    const auto finish_output = [&] {
      release(smem.v_barriers[v.stage].empty);
      v.next();
      if constexpr (kFreshSums)
        o.for_each_with(fresh, [&](Accumulator& x, Accumulator& more, int, int, int) { x = begins ? more : x + more; });
      begins = false;
    };
    const auto add_terms = [&] {
      release(smem.k_barriers[k.stage].empty);
      k.next();
      if constexpr (kSoftcap) Tangent::apply(s, tangent_factor);
      if constexpr (kKeyBias) {
        if (params.key_bias != nullptr) mbarrier_wait(smem.bias_barriers[bias.stage].full, bias.parity);
        smem.key_bias[bias.stage].add(s, kSoftcap ? params.softcap : params.scale);
        if (params.key_bias != nullptr) release_bias();
      }
    };
    const auto scores_to_p = [&](bool masked) {
      if (masked) mask_by_limits(s, params, row0, block * kTile.block_n);
      return softmax.update(s, rescale);
    };
    // The scores of a block, and the output of the one before under their softmax.
    const auto step = [&](auto masked) {
      mbarrier_wait(smem.k_barriers[k.stage].full, k.parity);
      take_turn();
      issue_scores();
      if constexpr (kOverlaps) issue_output();
      pass_turn();
      wgmma_wait<kOverlaps>(s);
      add_terms();
      const bool moved = scores_to_p(decltype(masked)::value);
      if constexpr (kOverlaps) {
        wgmma_wait<0>(sums);
        finish_output();
      }
      if constexpr (!kHasValue) return;
      p.from(s);
      if (moved && !begins) o.for_each([&](Accumulator& x, int slot, int, int) { x *= rescale[slot]; });
      if constexpr (!kOverlaps) {
        issue_output();
        wgmma_wait<0>(sums);
        finish_output();
      }
    };

    if constexpr (kOverlaps) {
      wgmma_wait<0>(s);
      add_terms();
      if (blocks.is_full(block)) {
        scores_to_p(false);
      } else {
        scores_to_p(true);
      }
      p.from(s);
      --block;
      for (; kLeavesOut && left_out > 0; --left_out) {
        mbarrier_wait(smem.v_barriers[v.stage].full, v.parity);
        warpgroup_sync();
        release(smem.v_barriers[v.stage].empty);
        v.next();
      }
    }
    for (; block >= blocks.begin && block >= blocks.full_end; --block) step(Flag<true>{});
    for (; block >= blocks.begin && block >= blocks.full_begin; --block) step(Flag<false>{});
    for (; block >= blocks.begin; --block) step(Flag<true>{});
    const BatchIndex batch = smem.work[q.stage].batch;
    mbarrier_arrive(smem.q_barriers[q.stage].empty);  // all products with Q are done
    q.next();
    take_turn();
    if constexpr (kOverlaps) issue_output();
    if constexpr (kCrossTiles) is_tile = start_tile();
    pass_turn();
    if constexpr (kOverlaps) {
      wgmma_wait<kCrossTiles>(sums);
      finish_output();
    }
    finish_o(params, batch, row0, o, softmax);
    if constexpr (kCrossTiles) {
      if (params.store_map) {
        store_by_copy(tma, batch, row0 - warp_row0, warp_row0, o, reinterpret_cast<StagedRows&>(smem.o));
      } else {
        store_o(params, batch, row0, o);
      }
    } else {
      store_o(params, batch, row0, o);
      is_tile = start_tile();
    }
  }
  if constexpr (kOverlaps) wgmma_wait<0>(s);
  if (warpgroup() == 1) take_turn();  // which the last has passed on
  store_empty_tiles(params, warp_row0);
  if (lane_id() == 0) tma_store_wait_read();  // shared memory is there until it has been read
}

__device__ __forceinline__ void attention_forward(const TmaParams& tma, SharedStorage& smem) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQStages; ++i) smem.q_barriers[i].start(128 * kConsumers);
    for (int i = 0; i < kStages; ++i) smem.k_barriers[i].start(kConsumers), smem.v_barriers[i].start(kConsumers);
    for (int i = 0; i < kBiasStages; ++i) smem.bias_barriers[i].start(4 * kConsumers);
    mbarrier_publish();
  }
  if (kKeyBias && tma.params.key_bias == nullptr) {
    for (int i = threadIdx.x; i < kBiasStages * kTile.block_n; i += blockDim.x)
      smem.key_bias[i / kTile.block_n].bias[i % kTile.block_n] = 0;
  }
  __syncthreads();  // the barriers are there
  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<kConsumers == 2 ? 24 : 32>();
    if (threadIdx.x == 0) produce(tma, smem);
  } else {
    warpgroup_reg_alloc<kConsumers == 2 ? 240 : 160>();
    consume(tma, smem);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * cuflash::kTile.warps, 1)
    KERNEL(const __grid_constant__ cuflash::TmaParams params) {
  extern __shared__ __align__(1024) char smem[];
  cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
