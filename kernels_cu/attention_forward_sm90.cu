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
#include "ptx/bulk.cuh"
#include "ptx/registers.cuh"
#include "softmax.cuh"
#include "store_direct.cuh"
#include "terms_sm90.cuh"

namespace cuflash {

constexpr int kConsumers = kTile.warps / 4 - 1, kStages = kTile.stages, kQStages = kTile.q_stages;
static_assert(kTile.block_m == 64 * kConsumers, "each consumer warpgroup has 64 rows");
// Of each thread: with two warpgroups of consumers all of 504, with three of 512.
constexpr int kProducerRegisters = kConsumers == 2                         ? 40
                                   : kTile.block_n + kTile.value_dim > 160 ? 32
                                                                           : 56,
              kConsumerRegisters = ((kConsumers == 2 ? 504 : 512) - kProducerRegisters) / kConsumers;
constexpr bool kHasValue = kTile.value_dim > 0;  // or lse alone
// Sums of three planes stay in the tensor cores for one block: those cut off what ordinary additions round.
constexpr bool kFreshSums = kPlanes == 3;
// These fill the registers, and their products last so long that the other warpgroup's softmax runs under them anyway.
constexpr bool kOverlaps = !kFreshSums && kHasValue;
// With a second Q, the first scores of a tile are formed under the last output and the epilogue of the one before.
constexpr bool kCrossTiles = kQStages > 1;
// Half of a second Q does, too: each warpgroup's rows have a buffer of their own, from a ring of three. The first one's
// of the next tile are there early; the second's come where the first's were, whose last scores are formed half a step
// before its own, and two steps of products before it needs them.
constexpr bool kSplitQ = kQStages == 3;
constexpr int kQFills = kSplitQ ? kConsumers : 1;  // copies of Q a tile
constexpr int kQRows = kTile.block_m / kQFills;
static_assert(!kSplitQ || kConsumers == 2, "a ring of three is for two warpgroups");
// Records of tiles: the producer works out the next one while that of the tile before is still read.
constexpr int kWorks = 3;
// Barriers of the CTA: from 1 on kConsumers of a warpgroup and its storer, then as many of turns, then, where Q is
// split, those that o waits for.
constexpr int kSecondScored = 2 * kConsumers + 1, kFirstStored = kSecondScored + 1;
// Warpgroups issue their products in turns, so that the softmax of one runs under the products of another.
constexpr bool kTakeTurns = kOverlaps && kPlanes == 1;
// Blocks without a mask bet that no reference moves, where the registers hold scores beside p.
constexpr bool kBets = kOverlaps && kPlanes == 1 && (kConsumers == 2 || kTile.block_n <= 96);
// A softcap with wide values or key_bias takes all registers: descriptors of Q are then made for each block, and scores
// are formed part by part.
constexpr bool kTight = kBets && kSoftcap && (kTile.value_dim > 128 || kKeyBias);
// With a softcap on a series, the same for all warps of a warpgroup.
constexpr bool kBetsOnSeries = kBets && kSoftcap;
// Pairs of p that a bet forms under the last output, half of them. Without a softcap there is no gain where that output
// is there at once, of few features, or weights are in the registers.
constexpr int kEarly = kSoftcap || (!kKeyBias && kTile.value_dim > 64) ? kTile.block_n / 8 : 0;
// One piece of code for blocks with and without a mask: two make warpgroups of 160 registers spill.
constexpr bool kOneLoop = kConsumers == 3;
// The scale is part of the terms, not of the exponent, where key_bias is: of softcap alone the cap is there.
static_assert(kPrescaled == (kSoftcap || kKeyBias));
static_assert(kOverlaps || !kCrossTiles, "the registers of scores in flight");
static_assert(!kBetsOnSeries || (kTakeTurns && !kOneLoop), "a turn is the barrier between what warps write and read");
// A CTA claims its next tile when so many blocks of this one are still to be copied: early enough to be answered in
// time, and late, as what it claims waits for all that it has before.
constexpr int kBlocksAfterClaim = 2;
// Buffers of key_bias, of which warps are done later than of K.
constexpr int kBiasStages = 4;

// The last blocks of a tile may be beyond what the rows of a warpgroup see: it leaves out so many of those at most. It
// waits for K of the next while it has not given up V of the last tile yet, and while it may hold the turn of others,
// which have not given up that V either, nor K of what they do not leave out: fewer blocks than there are buffers. Only
// who gives up a buffer waits for it; by the turns, which count for what is left out, too, no warp falls a phase
// behind.
constexpr bool kLeavesOut = kTakeTurns && kTile.block_n < kTile.block_m && kStages > 1;
constexpr int kMostLeftOut = kLeavesOut ? min_of(kStages - 1, ceil_div(kTile.block_m - 64, kTile.block_n)) : 0;
static_assert(kMostLeftOut < kBiasStages);

// cuflash/params.py puts the maps before the rest.
struct TmaParams {
  TensorMap q[kPlanes], k[kPlanes], v[kPlanes], o;  // o where params.store_map
  Params params;
};

using QTile = PanelTile<kQRows, kTile.head_dim>;
using KTile = PanelTile<kTile.block_n, kTile.head_dim>;
struct NoTile {};
// Where there are no values the narrowest rows stand in their place, of which nothing is made.
constexpr int kValueDim = kHasValue ? kTile.value_dim : 64;
using VTile = ConditionalType<kHasValue, PanelTile<kTile.block_n, kValueDim>, NoTile>;
using Scores = Fragment<1, kTile.block_n>;
using OutputRows = Fragment<1, kValueDim>;
using Bias = BlockBias<kTile.block_n>;
using StagedRows = SharedTile<Output, kQRows, 64 * ceil_div(kValueDim, 64)>;

// A tile of query rows, the key blocks that they see, and which of those a warpgroup visits: to leave out the first
// ones is not worth its while.
struct alignas(16) TileWork {
  BatchIndex batch;
  int row0;
  BlockRange blocks;
  BlockRange own[kConsumers];
  int rows;

  __device__ __forceinline__ void locate(const Params& params, int tile) {
    const Work work = locate_section_rows(params, ceil_div(params.seqlen_q, kTile.block_m), tile);
    row0 = work.block * kTile.block_m;
    rows = min_of(kTile.block_m, params.seqlen_q - row0);
    batch = batch_index(params, work.owned, 0);
    blocks = key_blocks(params, row0, row0 + rows, kTile.block_n);
  }
  __device__ __forceinline__ void share(const Params& params) {
#pragma unroll 1
    for (int i = 0; i < kConsumers; ++i) {
      own[i] = blocks;
      if constexpr (kLeavesOut) {
        own[i] = key_blocks(params, row0 + 64 * i, row0 + 64 * (i + 1), kTile.block_n);
        own[i].begin = blocks.begin;
        own[i].end = min_of(blocks.end, max_of(max_of(blocks.begin + 1, blocks.end - kMostLeftOut), own[i].end));
      }
    }
  }
  __device__ __forceinline__ bool has_keys() const { return blocks.end > blocks.begin; }
};

struct SharedStorage {
  Planes<QTile> q[kQStages];  // o, later, where there is more than one
  Planes<KTile> k[kStages];
  Planes<VTile> v[kStages];
  Bias key_bias[kBiasStages];
  BufferBarriers q_barriers[kQStages], k_barriers[kStages], v_barriers[kStages], bias_barriers[kBiasStages];
  u64 work_read[kWorks];      // the record is there when the tile's Q is
  const float* key_bias_row;  // the producer's: of the tile's batch position
  TileWork work[kWorks];      // of no rows after the last
  SeriesOfWarps series[kConsumers];
};
static_assert(!kCrossTiles || (sizeof(StagedRows) <= sizeof(Planes<QTile>) && sizeof(Output) == 2),
              "o is staged where q was, by pairs");
static_assert(kSplitQ || StagedRows::kRowBytes == 128,
              "each warp's rows of o where its own rows of q were: no other's are in use");
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

__device__ __forceinline__ int tile_count(const Params& params) {
  return ceil_div(params.seqlen_q, kTile.block_m) * owned_count(params);
}

// One thread. The order is the consumers': V of a block after K of the next. The last V of a tile comes before all of
// the next tile, whose Q may have to wait for the tile before.
__device__ __forceinline__ void produce(const TmaParams& tma, SharedStorage& smem) {
  const Params& params = tma.params;
  const Strides& q_stride = kPlanes > 1 ? params.q_planes_stride : params.q_stride;
  const Strides& k_stride = kPlanes > 1 ? params.k_planes_stride : params.k_stride;
  const Strides& v_stride = kPlanes > 1 ? params.v_planes_stride : params.v_stride;
  const int tiles = tile_count(params);
  int tile = blockIdx.x, claimed;
  // Asks for a tile; the answer is on its way until somebody wants it. There are as many claims as tiles, since each
  // CTA's first is its own and its last claim is in vain: so the count is back at 0 in the end, for the next launch.
  const auto claim = [&] {
    if (params.claims != nullptr) claimed = atomicInc(params.claims, tiles - 1);
  };
  const auto step_to_claimed = [&] { tile = int(gridDim.x) + (params.claims == nullptr ? tile : claimed); };
  PipelineState<kWorks> w;
  // The first tile from this one on that sees keys; or returns false after the last.
  const auto find_tile = [&] {
    TileWork& work = smem.work[w.stage];
    mbarrier_wait(smem.work_read[w.stage], w.parity ^ 1);
    while (tile < tiles) {
      work.locate(params, tile);
      if (work.has_keys()) {
        work.share(params);
        return true;
      }
      claim();
      step_to_claimed();
    }
    return false;
  };
  PipelineState<kQStages> q;
  PipelineState<kStages> k, v;
  PipelineState<kBiasStages> bias;
  bool more = find_tile();
  while (more) {
    const TileWork& work = smem.work[w.stage];
    const BatchIndex batch = work.batch;
    const int row0 = work.row0, begin = work.blocks.begin;
    int block = work.blocks.end;
    w.next();
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
    const auto fill_v = [&](int of) {
      if constexpr (kHasValue) {
        fill(smem.v[v.stage], smem.v_barriers[v.stage], v.parity, tma.v, of * kTile.block_n, batch, v_stride);
        v.next();
      }
    };
    const auto fill_q = [&](int number) {
      fill(smem.q[q.stage], smem.q_barriers[q.stage], q.parity, tma.q, row0 + kQRows * number, batch, q_stride);
      q.next();
    };
    if constexpr (kCrossTiles) fill_q(0);
    fill_k();
    if constexpr (!kCrossTiles || kSplitQ) fill_q(kQFills - 1);  // its buffer is the last to become empty
    // The divisions of the next tile are made when one K of this one is still to be copied, or none.
    bool is_first = true, found = false;
    for (;; is_first = false) {
      if (is_first ? block - begin <= kBlocksAfterClaim : block - begin == kBlocksAfterClaim) claim();
      if (block == begin) break;
      if (!is_first && block - begin == 1) {
        step_to_claimed();
        more = find_tile();
        found = true;
      }
      fill_k();
      fill_v(block + 1);
    }
    fill_v(begin);
    if (!found) {
      step_to_claimed();
      more = find_tile();
    }
  }
  smem.work[w.stage].rows = 0;
#pragma unroll
  for (int i = 0; i < kQFills; ++i) {
    mbarrier_wait(smem.q_barriers[q.stage].empty, q.parity ^ 1);
    mbarrier_arrive(smem.q_barriers[q.stage].full);
    q.next();
  }
}

// The consumers are warpgroups 1 to kConsumers.
__device__ __forceinline__ int warpgroup() { return threadIdx.x / 128; }
__device__ __forceinline__ bool leads_warpgroup() { return threadIdx.x % 128 == 0; }
__device__ __forceinline__ void take_turn() {
  if constexpr (kTakeTurns) barrier_sync<256>(kConsumers + warpgroup());
}
__device__ __forceinline__ void pass_turn() {
  if constexpr (kTakeTurns) barrier_arrive<256>(kConsumers + 1 + warpgroup() % kConsumers);
}

// With a second Q, a warp of the producer's warpgroup stands by each of the consumers': it has the copy engine write o
// and gives up the buffer of Q where o lay. That it has seen to the tile before is known to the consumers, as they have
// waited for the Q that came into its buffer. Where Q is split, both consumers' o goes by way of the second one's
// buffer, one after the other: the last storer gives it up, into which the first one's Q of the tile after the next
// comes; the first storer tells the second consumer.
__device__ __forceinline__ void store_tiles(const TmaParams& tma, SharedStorage& smem) {
  const int group = warp_id() - 1;
  PipelineState<kQStages> q;
  q.stage = kQFills - 1;
  PipelineState<kWorks> w;
  for (;; q.template advance<kQFills>(), w.next()) {
    mbarrier_wait(smem.q_barriers[q.stage].full, q.parity);
    const TileWork& work = smem.work[w.stage];
    if (work.rows == 0) return;
    barrier_sync<160>(1 + group);
    if (lane_id() == 0) {
      if (tma.params.store_map) {
        StagedRows& staged = reinterpret_cast<StagedRows&>(smem.q[q.stage]);
        int at[3];
        batch_on_map(at, work.batch, tma.params.o_stride);
#pragma unroll
        for (int panel = 0; panel < StagedRows::kChunks / 8; ++panel) {
          const int col = panel * 8 * StagedRows::kChunk;
          tma_store(tma.o, staged.address(kSplitQ ? 0 : 64 * group, col), col, work.row0 + 64 * group, at);
        }
        bulk_commit();
        bulk_wait_read<0>();
      }
      if (!kSplitQ || group == 1) mbarrier_arrive(smem.q_barriers[q.stage].empty);
    }
    __syncwarp();
    if (kSplitQ && group == 0) barrier_arrive<160>(kFirstStored);
    mbarrier_arrive(smem.work_read[w.stage]);
  }
}

// Rounds o of a warp's rows to those of a tile.
__device__ __forceinline__ void stage_o(const OutputRows& o, StagedRows& staged, int row0) {
  if constexpr (sizeof(Output) == 2) {
    const u32 at = staged.address(row0 + lane_id() % 16, lane_id() / 16 * 8);
#pragma unroll
    for (int n = 0; n < kValueDim / 8; n += 2) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = pack<Output>(o.x[0][n + i / 2][i % 2 * 2], o.x[0][n + i / 2][i % 2 * 2 + 1]);
      stmatrix_x4(StagedRows::advance(at, 0, 8 * n), x);
    }
  }
}

__device__ __forceinline__ void store_o(const Params& params, const BatchIndex& batch, int row0, const OutputRows& o) {
  if constexpr (kHasValue)
    store_rows_direct(o, base<Output>(params.o, params.o_stride, batch), params.o_stride, row0, params.seqlen_q,
                      params.value_dim, params.store_vector != 0);
}

// Tiles of which no row sees a key, which nobody has loaded anything for.
__device__ __forceinline__ void store_empty_tiles(const Params& params, int warp_row0) {
  if (all_rows_see_keys(params)) return;
  for (int tile = blockIdx.x; tile < tile_count(params); tile += gridDim.x) {
    TileWork work;
    work.locate(params, tile);
    if (work.has_keys()) continue;
    const int row0 = work.row0 + warp_row0;
#pragma unroll 1
    for (int row = row0; row < min_of(row0 + 16, params.seqlen_q); ++row) {
      if constexpr (kHasValue) {
        Output* o = base<Output>(params.o, params.o_stride, work.batch) + row * params.o_stride.row;
#pragma unroll 1
        for (int col = lane_id(); col < params.value_dim; col += 32) o[col * params.o_stride.col] = Output{};
      }
      if (params.lse != nullptr && lane_id() == 0)
        base<Accumulator>(params.lse, params.lse_stride, work.batch)[row * params.lse_stride.row] = neg_inf();
    }
  }
}

// One warpgroup, 64 rows of each tile.
__device__ __forceinline__ void consume(const TmaParams& tma, SharedStorage& smem) {
  const Params& params = tma.params;
  // The compiler is to see that warps do not part: it then keeps stages in uniform registers.
  const int group = __shfl_sync(kFullWarp, warpgroup() - 1, 0);
  const int group_row0 = group * 64, warp_row0 = group_row0 + warp_id() % 4 * 16;
  const auto release = [](u64& empty) {
    if (leads_warpgroup()) mbarrier_arrive(empty);
  };
  PipelineState<kQStages> q;
  if constexpr (kSplitQ) q.stage = group;
  PipelineState<kWorks> w;
  PipelineState<kStages> k, v;
  PipelineState<kBiasStages> bias;
  Scores s;
  Tangent tangent(params);
  u32 reach = NoSeries::kReach;  // of the warpgroup's series, as its warps had it a step ago
  int next_set = 0;              // of what they need
  const auto write_reach = [&](u32 of_warp) {
    if constexpr (kBetsOnSeries) smem.series[group].write(next_set, of_warp);
  };
  const auto read_reach = [&] {
    if constexpr (kBetsOnSeries) {
      reach = smem.series[group].furthest(next_set);
      next_set ^= 1;
    }
  };
  const auto issue_scores = [&] {
    int stage = q.stage;
    if constexpr (kTight) asm volatile("" : "+r"(stage));  // or they are made once, and held
    issue_nt<kTile.head_dim>(s, smem.q[stage], kSplitQ ? 0 : group_row0, smem.k[k.stage]);
  };
  const auto wait_for_bias = [&] {
    if (kKeyBias && params.key_bias != nullptr) mbarrier_wait(smem.bias_barriers[bias.stage].full, bias.parity);
  };
  const auto release_bias = [&] {
    if (!kKeyBias || params.key_bias == nullptr) return;
    __syncwarp();  // all lanes have read it
    if (lane_id() == 0) mbarrier_arrive(smem.bias_barriers[bias.stage].empty);
    bias.next();
  };
  BlockRange blocks;
  // Gives up what is left out. By votes, as the compiler is to see that lanes do not part.
  const auto leave = [](BufferBarriers& barriers, u32 parity, bool gives_up) {
    while (__any_sync(kFullWarp, gives_up && !mbarrier_test(barriers.full, parity))) {
    }
    if (gives_up) mbarrier_arrive(barriers.empty);
  };
  // Whether there is a next tile, whose Q then is there. Its first scores are issued in any case: under a condition,
  // the compiler would wait for each of their products. After the last tile they are of what lies in shared memory, and
  // nobody looks.
  const auto start_tile = [&] {
    mbarrier_wait(smem.q_barriers[q.stage].full, q.parity);
    const TileWork& work = smem.work[w.stage];
    const bool is_tile = work.rows > 0;
    if (is_tile) {
      blocks = work.own[group];
      const int left_out = work.blocks.end - blocks.end;
#pragma unroll
      for (int i = 0; i < kMostLeftOut; ++i) {
        if (i == left_out) break;
        leave(smem.k_barriers[k.stage], k.parity, leads_warpgroup());
        k.next();
        if (kKeyBias && params.key_bias != nullptr) {
          leave(smem.bias_barriers[bias.stage], bias.parity, lane_id() == 0);
          bias.next();
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
    const int row0 = smem.work[w.stage].row0 + warp_row0;
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
    const auto finish_scores = [&] {
      release(smem.k_barriers[k.stage].empty);
      k.next();
      if (kSplitQ && block == blocks.begin) {
        if (group == 0) {
          release(smem.q_barriers[q.stage].empty);
        } else {
          barrier_arrive<256>(kSecondScored);
        }
      }
    };
    const auto add_terms = [&] {
      if constexpr (kSoftcap) tangent.apply<kBets, kTight ? 16 : kTile.block_n>(s);
      if constexpr (kKeyBias) smem.key_bias[bias.stage].add(s, kSoftcap ? params.softcap : params.scale);
    };
    const auto scores_to_p = [&](bool masked) {
      if (masked) mask_by_limits(s, params, row0, block * kTile.block_n);
      return softmax.update(s, rescale);
    };
    // The scores of a block, and the output of the one before under their softmax. With a softcap, the series that a
    // bet is on; without one scores are formed.
    const auto step = [&](auto masked, auto series) {
      using Series = decltype(series);
      constexpr bool kForms = kSoftcap && kSame<Series, NoSeries>;
      mbarrier_wait(smem.k_barriers[k.stage].full, k.parity);
      take_turn();
      issue_scores();
      if constexpr (kOverlaps) issue_output();
      pass_turn();
      wait_for_bias();
      Bias::OfLane weights;  // for a bet, read while products are formed
      if constexpr (kKeyBias && kBets) {
        if (!kForms && !masked) smem.key_bias[bias.stage].load(weights);
      }
      Tangent::Exponents<Series> exponents(tangent);
      read_reach();
      wgmma_wait<kOverlaps>(s);
      finish_scores();
      const auto finish = [&] {
        if constexpr (kOverlaps) {
          wgmma_wait<0>(sums);
          finish_output();
        }
      };
      // p, of which the output before is formed, is free when that is finished: before a bet, within it, or in the end.
      const bool bets = kBets && !kForms && !masked, finishes_last = !kBets || kForms || (!kOneLoop && masked);
      if (kEarly == 0 && !finishes_last) finish();
      // What the first half of a bet came to is part of what is written, or the compiler would form it after the wait.
      const auto finish_within = [&](bool is_good) {
        write_reach(is_good ? tangent.reach() : NoSeries::kReach);
        if constexpr (kEarly > 0) finish();
      };
      const auto bet = [&](auto exponent, auto has_lost) {
        return softmax.bet<kEarly>(s, exponent, has_lost, finish_within,
                                   [&](int number, float left, float right) { p.set(number, left, right); });
      };
      const auto never = [] { return false; };
      const auto of_formed = [&](float x, float minus_mc, int) { return fma(x, softmax.c, minus_mc); };
      const auto of_biased = [&](float x, float minus_mc, int i) {
        return fma(fma(x, params.scale, weights[i]), softmax.c, minus_mc);
      };
      // On raw scores: those that terms have not been added to.
      const auto bet_raw = [&] {
        if constexpr (kForms) {
          return false;
        } else if constexpr (!kSoftcap && !kKeyBias) {
          return bet(of_formed, never);
        } else if constexpr (!kSoftcap) {
          return bet(of_biased, never);
        } else {
          const auto of_capped = [&](float x, float minus_mc, int i) {
            return exponents.of(x, kKeyBias ? fma(weights[i], softmax.c, minus_mc) : minus_mc);
          };
          return bet(of_capped, [&] { return exponents.lost(); });
        }
      };
      bool won = false, moved = false;
      if (bets) {
        won = bet_raw();
      } else if (!finishes_last) {
        finish_within(true);
      }
      if (!won) {
        add_terms();
        moved = scores_to_p(masked);
        if (finishes_last) finish();
        if constexpr (kHasValue) p.from(s);
        write_reach(tangent.reach());
      }
      release_bias();
      if constexpr (!kHasValue) return;
      if (moved && !begins) o.for_each([&](Accumulator& x, int slot, int, int) { x *= rescale[slot]; });
      if constexpr (!kOverlaps) {
        issue_output();
        wgmma_wait<0>(sums);
        finish_output();
      }
    };

    if constexpr (kOverlaps) {
      wgmma_wait<0>(s);
      finish_scores();
      wait_for_bias();
      add_terms();
      write_reach(tangent.reach());
      release_bias();
      scores_to_p(!blocks.is_full(block));
      p.from(s);
#pragma unroll
      for (int i = 0; i < kMostLeftOut; ++i) {
        if (i == smem.work[w.stage].blocks.end - 1 - block) break;
        leave(smem.v_barriers[v.stage], v.parity, leads_warpgroup());
        v.next();
        take_turn();
        pass_turn();
      }
      --block;
    }
    if constexpr (kOneLoop) {
      for (; block >= blocks.begin; --block) step(!blocks.is_full(block), NoSeries{});
    } else if constexpr (kBetsOnSeries) {
      const auto bet_while_full = [&](auto series) {
        for (; block >= blocks.begin && blocks.is_full(block) && reach == series.kReach; --block)
          step(Flag<false>{}, series);
      };
      while (block >= blocks.begin) {
        bet_while_full(LowSeries{});
        bet_while_full(HighSeries{});
        for (; block >= blocks.begin && (!blocks.is_full(block) || reach == NoSeries::kReach); --block)
          step(!blocks.is_full(block), NoSeries{});
      }
    } else if constexpr (kSoftcap) {  // so much code that one piece for both masked ends spills less
      while (block >= blocks.begin) {
        for (; block >= blocks.begin && !blocks.is_full(block); --block) step(Flag<true>{}, NoSeries{});
        for (; block >= blocks.begin && blocks.is_full(block); --block) step(Flag<false>{}, NoSeries{});
      }
    } else {
      for (; block >= blocks.begin && block >= blocks.full_end; --block) step(Flag<true>{}, NoSeries{});
      for (; block >= blocks.begin && block >= blocks.full_begin; --block) step(Flag<false>{}, NoSeries{});
      for (; block >= blocks.begin; --block) step(Flag<true>{}, NoSeries{});
    }
    const BatchIndex batch = smem.work[w.stage].batch;
    mbarrier_arrive(smem.work_read[w.stage]);
    PipelineState<kQStages> staged = q;  // where o goes by way of
    if (kSplitQ && group == 0) staged.next();
    if constexpr (!kCrossTiles) release(smem.q_barriers[q.stage].empty);  // all products with it are done
    q.template advance<kQFills>(), w.next();
    take_turn();
    if constexpr (kOverlaps) issue_output();
    if constexpr (kCrossTiles) is_tile = start_tile();
    pass_turn();
    if constexpr (kOverlaps) {
      wgmma_wait<kCrossTiles>(sums);
      finish_output();
    }
    const Accumulator sum[2] = {quad_sum(softmax.row_sum[0]), quad_sum(softmax.row_sum[1])};
    Accumulator lse[2];
    average_rows(o, softmax, sum, params, lse);
    if constexpr (kSplitQ) {
      if (group == 0) {
        barrier_sync<256>(kSecondScored);
      } else {
        barrier_sync<160>(kFirstStored);
      }
    }
    if (kCrossTiles && params.store_map) {
      stage_o(o, reinterpret_cast<StagedRows&>(smem.q[staged.stage]), kSplitQ ? warp_row0 - group_row0 : warp_row0);
      fence_async_proxy();  // the copy engine is to see it
    } else {
      store_o(params, batch, row0, o);
    }
    if constexpr (kCrossTiles) barrier_arrive<160>(1 + group);
    write_lse(o, lse, params, batch, row0);  // nobody waits for it
    if constexpr (!kCrossTiles) is_tile = start_tile();
  }
  if constexpr (kOverlaps) wgmma_wait<0>(s);
  if (warpgroup() == 1) take_turn();  // which the last has passed on
  store_empty_tiles(params, warp_row0);
}

__device__ __forceinline__ void attention_forward(const TmaParams& tma, SharedStorage& smem) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQStages; ++i) smem.q_barriers[i].start(kSplitQ ? 1 : kConsumers);
    for (int i = 0; i < kStages; ++i) smem.k_barriers[i].start(kConsumers), smem.v_barriers[i].start(kConsumers);
    for (int i = 0; i < kBiasStages; ++i) smem.bias_barriers[i].start(4 * kConsumers);
    for (int i = 0; i < kWorks; ++i) mbarrier_init(smem.work_read[i], (kCrossTiles ? 160 : 128) * kConsumers);
    mbarrier_publish();
  }
  if (kKeyBias && tma.params.key_bias == nullptr) {
    for (int i = threadIdx.x; i < kBiasStages * kTile.block_n; i += blockDim.x)
      smem.key_bias[i / kTile.block_n].bias[i % kTile.block_n] = 0;
  }
  __syncthreads();  // the barriers are there
  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) produce(tma, smem);
    if (kCrossTiles && warp_id() > 0 && warp_id() <= kConsumers) store_tiles(tma, smem);
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    consume(tma, smem);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * cuflash::kTile.warps, 1)
    KERNEL(const __grid_constant__ cuflash::TmaParams params) {
  extern __shared__ __align__(1024) char smem[];
  cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
