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
#include "ptx/registers.cuh"
#include "softmax.cuh"

namespace cuflash {

constexpr int kConsumers = kTile.warps / 4 - 1, kStages = kTile.stages, kQStages = kTile.q_stages;
static_assert(kTile.block_m == 64 * kConsumers, "each consumer warpgroup has 64 rows");
// Sums of three planes stay in the tensor cores for one block: those cut off what ordinary additions round.
constexpr bool kFreshSums = kPlanes == 3;
// These fill the registers, and their products last so long that the other warpgroup's softmax runs under them anyway.
constexpr bool kOverlaps = !kFreshSums;
// With a second Q, the first scores of a tile are formed under the last output and the epilogue of the one before.
constexpr bool kCrossTiles = kQStages == 2;
static_assert(kOverlaps || !kCrossTiles, "the registers of scores in flight");

using QTile = PanelTile<kTile.block_m, kTile.head_dim>;
using KTile = PanelTile<kTile.block_n, kTile.head_dim>;
using VTile = PanelTile<kTile.block_n, kTile.value_dim>;
using Scores = Fragment<1, kTile.block_n>;
using OutputRows = Fragment<1, kTile.value_dim>;
using StagedRows = SharedTile<Output, kTile.block_m, 64 * ceil_div(kTile.value_dim, 64)>;

struct SharedStorage {
  Planes<QTile> q[kQStages];  // o, later
  Planes<KTile> k[kStages];
  Planes<VTile> v[kStages];
  BufferBarriers q_barriers[kQStages], k_barriers[kStages], v_barriers[kStages];
  int tile[kQStages];  // whose Q is in the buffer, or -1 after the last
};
static_assert(sizeof(StagedRows) <= sizeof(Planes<QTile>), "o is staged where q was");
static_assert(StagedRows::kRowBytes == 128,
              "each warp's rows of o where its own rows of q were: no other's are in use");
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

struct TileWork {
  int row0, rows, owned;
  BlockRange blocks;

  __device__ __forceinline__ TileWork(const Params& params, int tile) {
    const Work work = locate_section_rows(params, ceil_div(params.seqlen_q, kTile.block_m), tile);
    row0 = work.block * kTile.block_m, owned = work.owned;
    rows = min_of(kTile.block_m, params.seqlen_q - row0);
    blocks = key_blocks(params, row0, row0 + rows, kTile.block_n);
  }
  __device__ __forceinline__ bool has_keys() const { return blocks.end > blocks.begin; }
};

__device__ __forceinline__ int tile_count(const Params& params) {
  return ceil_div(params.seqlen_q, kTile.block_m) * owned_count(params);
}

// Where a batch is on a map, which has no axis to step along where the array is broadcast.
__device__ __forceinline__ void map_batch(int (&to)[3], const BatchIndex& batch, const Strides& stride) {
#pragma unroll
  for (int i = 0; i < 3; ++i) to[i] = stride.batch[i] == 0 ? 0 : batch.i[i];
}

// One thread. The order is the consumers': V of a block after K of the next.
__device__ __forceinline__ void produce(const TmaParams& tma, SharedStorage& smem) {
  const Params& params = tma.params;
  const Strides& q_stride = kPlanes > 1 ? params.q_planes_stride : params.q_stride;
  const Strides& k_stride = kPlanes > 1 ? params.k_planes_stride : params.k_stride;
  const Strides& v_stride = kPlanes > 1 ? params.v_planes_stride : params.v_stride;
  const int tiles = tile_count(params);
  const auto tile_after = [&](int tile) {
    return params.claims == nullptr ? tile + int(gridDim.x) : int(gridDim.x) + atomicAdd(params.claims, 1);
  };
  PipelineState<kQStages> q;
  PipelineState<kStages> k, v;
  for (int tile = blockIdx.x, next; tile < tiles; tile = next) {
    next = tile_after(tile);  // a claim takes its time: not when it is needed
    const TileWork work(params, tile);
    if (!work.has_keys()) continue;
    const BatchIndex batch = batch_index(params, work.owned, 0);
    int q_at[3], k_at[3], v_at[3];
    map_batch(q_at, batch, q_stride);
    map_batch(k_at, batch, k_stride);
    map_batch(v_at, batch, v_stride);
    mbarrier_wait(smem.q_barriers[q.stage].empty, q.parity ^ 1);
    smem.tile[q.stage] = tile;
    fill(smem.q[q.stage], smem.q_barriers[q.stage], q.parity, tma.q, work.row0, q_at);
    q.next();
    const auto fill_v = [&](int block) {
      fill(smem.v[v.stage], smem.v_barriers[v.stage], v.parity, tma.v, block * kTile.block_n, v_at);
      v.next();
    };
    for (int block = work.blocks.end - 1; block >= work.blocks.begin; --block) {
      fill(smem.k[k.stage], smem.k_barriers[k.stage], k.parity, tma.k, block * kTile.block_n, k_at);
      k.next();
      if (block + 1 < work.blocks.end) fill_v(block + 1);
    }
    fill_v(work.blocks.begin);
  }
  mbarrier_wait(smem.q_barriers[q.stage].empty, q.parity ^ 1);
  smem.tile[q.stage] = -1;
  mbarrier_arrive(smem.q_barriers[q.stage].full);
}

// Rounds o of the warp's rows and writes it and lse, by way of the shared memory of their q.
__device__ __forceinline__ void store_results(const Params& params, int tile, int warp_row0, OutputRows& o,
                                              const OnlineSoftmax<1>& softmax, Planes<QTile>& q_smem) {
  const TileWork work(params, tile);
  const BatchIndex batch = batch_index(params, work.owned, 0);
  Accumulator o_scale[2], lse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) softmax.finish(r, quad_sum(softmax.row_sum[r]), params.lse_scale, o_scale[r], lse[r]);
  if (params.lse != nullptr && lane_id() % 4 == 0) {  // one lane of those that share the row
    Accumulator* lse_gmem =
        base<Accumulator>(params.lse, params.lse_stride, batch) + (work.row0 + warp_row0) * params.lse_stride.row;
    Scores::for_each_row([&](int r, int row) {
      if (warp_row0 + row < work.rows) lse_gmem[row * params.lse_stride.row] = lse[r];
    });
  }
  o.for_each([&](Accumulator& x, int slot, int, int) { x *= o_scale[slot]; });
  store_rows(o, reinterpret_cast<StagedRows&>(q_smem), warp_row0, 0, base<Output>(params.o, params.o_stride, batch),
             params.o_stride, work.row0, params.seqlen_q, params.value_dim, params.store_vector != 0);
}

// Tiles of which no row sees a key, which nobody has loaded anything for: once all Q buffers are free.
__device__ __forceinline__ void store_empty_tiles(const Params& params, int warp_row0, Planes<QTile>& q_smem) {
  const bool rows_see_keys = params.band_hi >= 0 && params.seqlen_q - 1 + params.band_lo < params.seqlen_k;
  if (rows_see_keys) return;
  for (int tile = blockIdx.x; tile < tile_count(params); tile += gridDim.x) {
    if (TileWork(params, tile).has_keys()) continue;
    OutputRows o;
    o.clear();
    store_results(params, tile, warp_row0, o, OnlineSoftmax<1>(params.exponent_scale), q_smem);
  }
}

// One warpgroup, 64 rows of each tile.
__device__ __forceinline__ void consume(const Params& params, SharedStorage& smem) {
  const int group_row0 = (threadIdx.x / 128 - 1) * 64, warp_row0 = group_row0 + warp_id() % 4 * 16;
  const auto release = [](u64& empty) {
    if (threadIdx.x % 128 == 0) mbarrier_arrive(empty);
  };
  PipelineState<kQStages> q;
  PipelineState<kStages> k, v;
  Scores s;
  const auto issue_scores = [&] { issue_nt<kTile.head_dim>(s, smem.q[q.stage], group_row0, smem.k[k.stage]); };
  // The tile whose Q comes next, or -1. Its first scores are issued in any case: under a condition, the compiler would
  // wait for each of their products. After the last tile they are of what lies in shared memory, and nobody looks.
  const auto start_tile = [&] {
    mbarrier_wait(smem.q_barriers[q.stage].full, q.parity);
    const int tile = static_cast<volatile int&>(smem.tile[q.stage]);
    if constexpr (kOverlaps) {
      if (tile >= 0) mbarrier_wait(smem.k_barriers[k.stage].full, k.parity);
      issue_scores();
    }
    return tile;
  };

  int tile = start_tile();
  while (tile >= 0) {
    const TileWork work(params, tile);
    OutputRows o;
    OnlineSoftmax<1> softmax(params.exponent_scale);
    OperandA<kTile.block_n> p;
    OutputRows fresh;  // or unused
    OutputRows& sums = kFreshSums ? fresh : o;
    bool begins = true;
    int block = work.blocks.end - 1;
    Accumulator rescale[2];

    const auto issue_output = [&] {
      mbarrier_wait(smem.v_barriers[v.stage].full, v.parity);
      issue_nn(sums, p, smem.v[v.stage], kFreshSums || begins);
    };
    const auto finish_output = [&] {
      release(smem.v_barriers[v.stage].empty);
      v.next();
      if constexpr (kFreshSums)
        o.for_each_with(fresh, [&](Accumulator& x, Accumulator& more, int, int, int) { x = begins ? more : x + more; });
      begins = false;
    };
    const auto scores_to_p = [&](bool masked) {
      release(smem.k_barriers[k.stage].empty);
      k.next();
      if (masked) mask_by_limits(s, params, work.row0 + warp_row0, block * kTile.block_n);
      return softmax.update(s, rescale);
    };
    // The scores of a block, and the output of the one before under their softmax.
    const auto step = [&](auto masked) {
      mbarrier_wait(smem.k_barriers[k.stage].full, k.parity);
      issue_scores();
      if constexpr (kOverlaps) issue_output();
      wgmma_wait<kOverlaps>(s);
      const bool moved = scores_to_p(decltype(masked)::value);
      if constexpr (kOverlaps) {
        wgmma_wait<0>(sums);
        finish_output();
      }
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
      scores_to_p(true);
      p.from(s);
      --block;
    }
    for (; block >= work.blocks.begin && block >= work.blocks.full_end; --block) step(Flag<true>{});
    for (; block >= work.blocks.begin && block >= work.blocks.full_begin; --block) step(Flag<false>{});
    for (; block >= work.blocks.begin; --block) step(Flag<true>{});
    if constexpr (kOverlaps) issue_output();
    const int done = tile, q_stage = q.stage;
    q.next();
    if constexpr (kCrossTiles) tile = start_tile();
    if constexpr (kOverlaps) {
      wgmma_wait<kCrossTiles>(sums);
      finish_output();
    }
    store_results(params, done, warp_row0, o, softmax, smem.q[q_stage]);
    fence_async_proxy();  // o has been read from where a Q goes
    mbarrier_arrive(smem.q_barriers[q_stage].empty);
    if constexpr (!kCrossTiles) tile = start_tile();
  }
  if constexpr (kOverlaps) wgmma_wait<0>(s);
  store_empty_tiles(params, warp_row0, smem.q[0]);
}

__device__ __forceinline__ void attention_forward(const TmaParams& tma, SharedStorage& smem) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQStages; ++i) smem.q_barriers[i].start(128 * kConsumers);
    for (int i = 0; i < kStages; ++i) smem.k_barriers[i].start(kConsumers), smem.v_barriers[i].start(kConsumers);
    mbarrier_publish();
  }
  __syncthreads();  // the barriers are there
  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<kConsumers == 2 ? 24 : 32>();
    if (threadIdx.x == 0) produce(tma, smem);
  } else {
    warpgroup_reg_alloc<kConsumers == 2 ? 240 : 160>();
    consume(tma.params, smem);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * cuflash::kTile.warps, 1)
    KERNEL(const __grid_constant__ cuflash::TmaParams params) {
  extern __shared__ __align__(1024) char smem[];
  cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
