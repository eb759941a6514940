// Backward of queries for sm_90a: as in the forward, a CTA has a tile of query rows and key blocks stream by, brought
// by the copy engine. Two warpgroups multiply by wgmma, each of them 64 rows:
//   s = Q K^T,  dp = dO V^T,  p = exp(s - lse),  ds = p (dp - delta),  dQ += ds K.
// The last product of a block is issued with the first two of the next, also of the next tile: K is in use for a step
// more than V, and has a buffer more. The last product comes first, so that its K is given up early. CTAs stay and take
// one tile after another. A CTA sums over the batch axes on which q was broadcast, in a fixed order: no atomics. Score
// terms are those of terms_rows_sm90.cuh.
#include "gemm_sm90.cuh"
#include "blocks.cuh"
#include "dq_clear_sm90.cuh"
#include "locate.cuh"
#include "mask.cuh"
#include "pipeline_sm90.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "store_direct.cuh"
#include "terms_rows_sm90.cuh"

namespace cuflash {

constexpr int kConsumers = 2, kRows = 64;  // of a warpgroup
// Of each thread: all of 504. Sums, scores and ds of consumers are to leave some 30 of theirs.
constexpr int kProducerRegisters = kTile.head_dim / 2 + 5 * kTile.block_n / 4 > 200 ? 24 : 40,
              kConsumerRegisters = (504 - kProducerRegisters) / 2;
// A single V comes in parts, by columns, and dO likewise: while one is copied, others are still read.
constexpr int kVParts = kTile.stages > 1             ? 1
                        : kTile.value_dim % 128 == 0 ? kTile.value_dim / 128
                                                     : kTile.value_dim / 64;
constexpr int kKStages = kTile.stages + 1, kVStages = kTile.stages;
// Records of tiles: the producer works out the next one while that of the tile before is still read.
constexpr int kWorks = 3;
// Warpgroups issue their products in turns, so that what one makes of scores runs under the products of another. With a
// single V they would wait for it in turns, too.
constexpr bool kTakeTurns = kTile.stages > 1;
// A CTA claims its next tile when so many blocks of this one are still to be copied: early enough to be answered in
// time, and late, as what it claims waits for all that it has before.
constexpr int kBlocksAfterClaim = 2;
constexpr bool kTerms = kKeyBias;
// Weights of keys come while scores are formed, or, where there are no registers for that, dp.
constexpr bool kEarlyKeys = kTerms && kTile.head_dim <= 192;
// Whether what the record of a tile says is read once, and not for each block: beside products shared memory answers
// late. Wide tiles leave no registers to keep it in.
constexpr bool kKeepsRecord = kTile.head_dim <= 192;
static_assert(kSoftcap == kTerms, "one kernel serves all terms");
static_assert(!kTerms || kTile.block_n == 64, "a lane has the weights of two keys");
static_assert(kTile.block_m == kRows * kConsumers && kTile.warps == 4 * (kConsumers + 1));
static_assert(kRowPadding % kTile.block_m == 0, "tiles of row vectors load whole");

// cuflash/params.py puts the maps before the rest.
struct TmaParams {
  TensorMap q[kPlanes], k[kPlanes], v[kPlanes], dout[kPlanes];
  Params params;
};

constexpr int kPartCols = kTile.value_dim / kVParts;
using QTile = PanelTile<kRows, kTile.head_dim>;
using DoutTile = PanelTile<kRows, kPartCols>;
using KTile = PanelTile<kTile.block_n, kTile.head_dim>;
using VTile = PanelTile<kTile.block_n, kPartCols>;
using Scores = Fragment<1, kTile.block_n>;

// A tile of query rows and the key blocks that it sees, which end at 0 after the last tile.
struct TileRange {
  int row0;
  BlockRange blocks;
};
// At the first of the batch positions over which it is summed.
struct TileWork : TileRange {
  BatchIndex batch;
  int owned;

  __device__ __forceinline__ void locate(const Params& params, int tile) {
    const Work work = locate_section_rows(params, ceil_div(params.seqlen_q, kTile.block_m), tile);
    row0 = work.block * kTile.block_m;
    owned = work.owned;
    batch = batch_index(params, owned, 0);
    blocks = key_blocks(params, row0, min_of(row0 + kTile.block_m, params.seqlen_q), kTile.block_n);
  }
};
// What the producer is at: the batch position, the first row, the first block of keys and how many there are.
struct Filling {
  BatchIndex batch;
  int row0, begin, count;
};
struct RowVectors {
  alignas(16) float lse[kRows], delta[kRows];
};
struct SharedStorage {
  Planes<QTile> q[kConsumers];
  Planes<DoutTile> dout[kConsumers][kVParts];
  Planes<KTile> k[kKStages];
  Planes<VTile> v[kVStages][kVParts];
  RowVectors rows[kConsumers];  // lse comes with q, delta with the first part of dout
  BufferBarriers q_barriers[kConsumers], dout_barriers[kConsumers][kVParts], k_barriers[kKStages],
      v_barriers[kVStages][kVParts];
  u64 work_read[kWorks];  // the record is there when q is
  TileWork work[kWorks];
  Filling filling;
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

__device__ __forceinline__ int tile_count(const Params& params) {
  return ceil_div(params.seqlen_q, kTile.block_m) * owned_count(params);
}

// One thread. The order is that in which the consumers give up what was there before.
__device__ __forceinline__ void produce(const TmaParams& tma, SharedStorage& smem) {
  const Params& params = tma.params;
  const int tiles = tile_count(params);
  int tile = blockIdx.x, claimed;
  // As in the forward: the answer is on its way until it is wanted, and the last claims leave the count at 0.
  const auto claim = [&] { claimed = atomicInc(params.claims, tiles - 1); };
  PipelineState<kWorks> w;
  PipelineState<kKStages> k;
  PipelineState<kVStages> v;
  u32 parity = 0;  // of q and dout
  // No registers are left to keep them in.
  const volatile Filling& filling = smem.filling;
  const auto batch = [&] { return BatchIndex{{filling.batch.i[0], filling.batch.i[1], filling.batch.i[2]}}; };
  grid_wait();  // row vectors are there, and whoever counted before is done
  for (; tile < tiles; tile = int(gridDim.x) + claimed) {
    mbarrier_wait(smem.work_read[w.stage], w.parity ^ 1);
    TileWork& work = smem.work[w.stage];
    work.locate(params, tile);
    int left = work.blocks.end - work.blocks.begin;
    if (left <= 0) {
      claim();
      continue;
    }
    smem.filling = {work.batch, work.row0, work.blocks.begin, left};
    const auto fill_rows = [&](int group) {
      constexpr u32 kBytes = sizeof(RowVectors::lse);
      const auto fill_vector = [&](float* rows, const float* of_rows, u64& barrier) {
        const i64 at = offset(params.row_lse_stride, batch()) + filling.row0 + kRows * group;
        bulk_load(rows, of_rows + at, kBytes, barrier);
      };
      fill(smem.q[group], smem.q_barriers[group], parity, tma.q, filling.row0 + kRows * group, batch(), params.q_stride,
           kBytes);
      fill_vector(smem.rows[group].lse, params.row_lse, smem.q_barriers[group].full);
#pragma unroll
      for (int part = 0; part < kVParts; ++part) {
        BufferBarriers& barriers = smem.dout_barriers[group][part];
        fill(smem.dout[group][part], barriers, parity, tma.dout, filling.row0 + kRows * group, batch(),
             params.dout_stride, part == 0 ? kBytes : 0, kPartCols * part);
        if (part == 0) fill_vector(smem.rows[group].delta, params.delta, barriers.full);
      }
    };
    for (int summed = 1;; ++summed) {
      const bool is_last = summed == loop_count(params);
      for (bool is_first = true; left > 0; is_first = false) {
        if (is_last && (is_first ? left <= kBlocksAfterClaim : left == kBlocksAfterClaim)) claim();
        --left;
        if (is_first) fill_rows(0);
        fill(smem.k[k.stage], smem.k_barriers[k.stage], k.parity, tma.k, (filling.begin + left) * kTile.block_n,
             batch(), params.k_stride);
        k.next();
        if (is_first) fill_rows(1);
#pragma unroll
        for (int part = 0; part < kVParts; ++part) {
          fill(smem.v[v.stage][part], smem.v_barriers[v.stage][part], v.parity, tma.v,
               (filling.begin + left) * kTile.block_n, batch(), params.v_stride, 0, kPartCols * part);
        }
        v.next();
      }
      parity ^= 1;
      if (is_last) break;
      left = filling.count;
      smem.filling.batch = batch_index(params, smem.work[w.stage].owned, summed);
    }
    w.next();
  }
  mbarrier_wait(smem.work_read[w.stage], w.parity ^ 1);
  smem.work[w.stage].blocks.end = 0;
#pragma unroll
  for (int group = 0; group < kConsumers; ++group) {
    mbarrier_wait(smem.q_barriers[group].empty, parity ^ 1);
    mbarrier_arrive(smem.q_barriers[group].full);
  }
}

// Read each time: wide tiles leave no register to keep it in.
__device__ __forceinline__ bool leads_warpgroup() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread % 128 == 0;
}
// The consumers are warpgroups 1 and 2.
__device__ __forceinline__ int warpgroup() { return threadIdx.x / 128; }
__device__ __forceinline__ void take_turn() {
  if constexpr (kTakeTurns) barrier_sync<256>(warpgroup());
}
__device__ __forceinline__ void pass_turn() {
  if constexpr (kTakeTurns) barrier_arrive<256>(3 - warpgroup());
}

// One warpgroup, 64 rows of each tile.
__device__ __forceinline__ void consume(const TmaParams& tma, SharedStorage& smem) {
  const Params& params = tma.params;
  // The compiler is to see that warps do not part: it then keeps stages in uniform registers.
  const int group = __shfl_sync(kFullWarp, warpgroup() - 1, 0);
  const int warp_row0 = group * kRows + warp_id() % 4 * 16;
  const auto release = [](u64& empty) {
    if (leads_warpgroup()) mbarrier_arrive(empty);
  };
  const auto release_by_warp = [](u64& empty) {
    if (lane_id() == 0) mbarrier_arrive(empty);
  };
  PipelineState<kWorks> w;
  PipelineState<kKStages> k;
  PipelineState<kVStages> v;
  u32 parity = 0;  // of q and dout
  int block;
  Scores s, dp;
  OwnRows rows;
  i64 key_bias_row = 0;  // at the batch position
  BlockKeys<kTile.block_n> keys;
  OperandA<kTile.block_n> ds;

  const auto await_rows = [&] { mbarrier_wait(smem.q_barriers[group].full, parity); };
  // Whether there is a next tile, whose q then is there.
  const auto start_tile = [&] {
    await_rows();
    block = smem.work[w.stage].blocks.end - 1;
    return block >= 0;
  };
  // Those of a tile's first block are issued whether it is one or not: under a condition, the compiler would wait for
  // each of their products. After the last tile they are of what lies in shared memory, and nobody looks.
  const auto issue_scores = [&](bool is_tile) {
    int own = group;
    asm volatile("" : "+r"(own));  // its descriptors are made again each time, not kept
    if (is_tile) mbarrier_wait(smem.k_barriers[k.stage].full, k.parity);
    issue_nt<kTile.head_dim>(s, smem.q[own], 0, smem.k[k.stage]);
#pragma unroll
    for (int part = 0; part < kVParts; ++part) {
      if (is_tile) {
        mbarrier_wait(smem.dout_barriers[group][part].full, parity);
        mbarrier_wait(smem.v_barriers[v.stage][part].full, v.parity);
      }
      issue_nt<kPartCols>(dp, smem.dout[own][part], 0, smem.v[v.stage][part], part == 0);
    }
  };
  // At a batch position among those that are summed.
  const auto begin_keys = [&](int summed) {
    const volatile TileWork& work = smem.work[w.stage];
    key_bias_row = offset(params.key_bias_stride, batch_index(params, work.owned, summed));
  };
  const auto load_keys = [&] { keys.load(params, key_bias_row, block * kTile.block_n); };
  const auto start_rows = [&] {
    rows.load(smem.rows[group].lse, smem.rows[group].delta);
    __syncwarp();  // before its first lane gives them up
  };
  TileRange kept;
  const auto record = [&]() -> const auto& {
    if constexpr (kKeepsRecord) {
      return kept;
    } else {
      return const_cast<const volatile TileWork&>(smem.work[w.stage]);
    }
  };
  const auto scores_to_ds = [&] {
    const auto& work = record();
    if constexpr (kTerms && !kEarlyKeys) load_keys();
    wgmma_wait<kVParts>(s);
    const bool is_last = block == work.blocks.begin;
    if (is_last) release_by_warp(smem.q_barriers[group].empty);
    if constexpr (kTerms) {
      if (is_capped(params)) {
        Tangent(params).apply<false, 16>(s, rows.any_is_large);
      } else {
        keys.add(s, params.scale);
      }
      if (keys.any_is_absent()) keys.mask_absent(s);
    }
    if (block < work.blocks.full_begin || block >= work.blocks.full_end)
      mask_by_limits(s, params, work.row0 + warp_row0, block * kTile.block_n);
    if constexpr (kTerms) {
      if (is_capped(params)) {
        keys.tanh_to_p(s, params, rows);
      } else {
        rows.scores_to_p(s, params);
      }
    } else {
      rows.scores_to_p(s, params);
    }
    const auto release_part = [&](int part) {
      release(smem.v_barriers[v.stage][part].empty);
      if (is_last) release_by_warp(smem.dout_barriers[group][part].empty);
    };
    static_assert(kVParts <= 3);
    if constexpr (kVParts > 2) {
      wgmma_wait<2>();
      release_part(kVParts - 3);
    }
    if constexpr (kVParts > 1) {
      wgmma_wait<1>();
      release_part(kVParts - 2);
    }
    wgmma_wait<0>(dp);
    release_part(kVParts - 1);
    v.next();
    rows.dp_to_ds(dp, s);
    ds.from(dp);
  };

  if (warpgroup() == kConsumers) pass_turn();  // the first begins
  bool is_tile = start_tile();
  take_turn();
  issue_scores(is_tile);
  pass_turn();
  while (is_tile) {
    Fragment<1, kTile.head_dim> dq;
    bool begins = true;
    if constexpr (kKeepsRecord) kept = smem.work[w.stage];
    // dq of this block, and the scores of the next.
    const auto issue = [&](bool is_tile) {
      const Planes<KTile>& own = smem.k[k.stage];
      u64& empty = smem.k_barriers[k.stage].empty;
      k.next();
      take_turn();
      issue_nn(dq, ds, own, begins);
      issue_scores(is_tile);
      pass_turn();
      begins = false;
      wgmma_wait<1 + kVParts>(dq);
      release(empty);
    };
    if constexpr (kTerms) begin_keys(0);
    if constexpr (kEarlyKeys) load_keys();
    wgmma_wait<0>(s);
    wgmma_wait<0>(dp);
    start_rows();
    scores_to_ds();
    for (int summed = loop_count(params);;) {
      const auto& blocks = record().blocks;
      const bool ends_rows = block == blocks.begin;
      if (ends_rows) {
        parity ^= 1;
        if (--summed == 0) break;
        block = blocks.end;
        await_rows();
      }
      --block;
      issue(true);
      if (kTerms && ends_rows) begin_keys(loop_count(params) - summed);
      if constexpr (kEarlyKeys) load_keys();
      if (ends_rows) start_rows();
      scores_to_ds();
    }
    const TileWork& work = smem.work[w.stage];
    const BatchIndex batch = work.batch;
    const int row0 = work.row0 + warp_row0;
    mbarrier_arrive(smem.work_read[w.stage]);
    w.next();
    is_tile = start_tile();
    issue(is_tile);
    dq.for_each([&](float& x, int, int, int) { x *= params.scale; });
    store_rows_direct(dq, base<Output>(params.dq, params.dq_stride, batch), params.dq_stride, row0, params.seqlen_q,
                      params.head_dim, params.store_vector != 0);
  }
  wgmma_wait<0>(s);
  wgmma_wait<0>(dp);
  if (warpgroup() == 1) take_turn();  // which the last has passed on
}

__device__ __forceinline__ void attention_backward_dq(const TmaParams& tma, SharedStorage& smem) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kConsumers; ++i) {
      smem.q_barriers[i].start(4);  // warps, which have read row vectors
      for (int part = 0; part < kVParts; ++part) smem.dout_barriers[i][part].start(4);
    }
    for (int i = 0; i < kKStages; ++i) smem.k_barriers[i].start(kConsumers);
    for (int i = 0; i < kVStages; ++i)
      for (int part = 0; part < kVParts; ++part) smem.v_barriers[i][part].start(kConsumers);
    for (int i = 0; i < kWorks; ++i) mbarrier_init(smem.work_read[i], 128 * kConsumers);
    mbarrier_publish();
  }
  __syncthreads();  // the barriers are there
  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) produce(tma, smem);
    if (warp_id() == 1) clear_dq(tma.params);
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    consume(tma, smem);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * cuflash::kTile.warps, 1)
    KERNEL(const __grid_constant__ cuflash::TmaParams params) {
  extern __shared__ __align__(1024) char smem[];
  cuflash::attention_backward_dq(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
