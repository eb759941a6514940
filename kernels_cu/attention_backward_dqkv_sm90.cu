// Backward of queries, keys and values at once for sm_90a, or of keys and values alone (without kNeedsDq): a CTA owns a
// block of keys and its values, and query blocks stream by, brought by the copy engine. Two warpgroups multiply by
// wgmma, each of them on 64 keys and transposed scores, so that p^T and ds^T go from accumulators to A operands without
// leaving registers:
//   s^T = K Q^T,  dp^T = V dO^T,  p = exp(s - lse),  ds = p (dp - delta),  dV += p^T dO,  dK += ds^T Q.
// They share ds for dQ = ds K, of which each forms one half. Threads of the producer's warpgroup pass that on
// (dq_turns_sm90.cuh), and dk and dv after the last step, by way of the same buffers. CTAs stay and claim one block of
// keys after another. A CTA sums dk and dv over the batch axes on which they were broadcast, in a fixed order: no
// atomics. Or each has one batch position, and they sum dk and dv as they do dq; so also where each has some of the
// query rows, as of the last blocks of keys. dkey_bias a CTA sums over query rows alone: key_bias may be broadcast on
// other axes than k.
#include "gemm_sm90.cuh"
#include "terms_backward_sm90.cuh"
#include "dq_clear_sm90.cuh"
#include "dq_turns_sm90.cuh"
#include "key_work_sm90.cuh"
#include "mask.cuh"
#include "pipeline_sm90.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "recompute_sm90.cuh"
#include "row_terms_sm90.cuh"
#include "store_direct.cuh"

namespace cuflash {

constexpr int kConsumers = 2, kStages = kTile.stages;
// Of dq a warpgroup has 64 rows or 64 columns.
constexpr bool kSplitRows = kTile.block_m == 128;
// Of each thread: all of 504.
constexpr int kProducerRegisters = 24, kConsumerRegisters = (504 - kProducerRegisters) / 2;
// Of p so many columns are formed while dp is, the others among the multiplications of ds: exponentials are the slowest
// of these instructions, and keep few others waiting if they are spread.
constexpr int kEarlyColumns = !kSplitRows ? 32 : kKeyBias ? 56 : 40;
constexpr bool kHasScoreTerms = kSoftcap || kKeyBias;
// Whether products take off lse and delta. It pays above 64 features, where shared memory is what is full.
constexpr bool kTermsInProducts = !kSplitRows && !kHasScoreTerms;
// Likewise, the last steps of scores have K in registers: as many as there are registers for.
constexpr int kHeldSteps = 2;
// Whether calls with rows that need care have a loop of their own: a branch in a common one keeps ptxas from mixing
// exponentials, products and stores. With score terms there are no registers for two.
constexpr bool kTwoLoops = !kHasScoreTerms;
// Where they are too few for what else would be read early or kept from step to step.
constexpr bool kIsCramped = kSplitRows && kKeyBias;
// Whether the next step is begun before the products of dk, which wait for those of dq anyway.
constexpr bool kBeginsEarly = kSplitRows && !kIsCramped;
constexpr int kDsBuffers = 2, kSendBuffers = 2;
constexpr int kConsumerWarps = 4 * kConsumers;  // warps that fill a buffer of results
static_assert(kStages >= 2, "the next q is awaited before this one is given up");
static_assert(kTile.block_n == 64 * kConsumers, "each consumer warpgroup has 64 keys");
static_assert(kSplitRows ? kTile.head_dim == 64 : kTile.block_m == 64 && kTile.head_dim > 64 && kTile.head_dim <= 128);
static_assert(kRowPadding % kTile.block_m == 0, "tiles of row vectors load whole");

// cuflash/params.py puts the maps before the rest.
struct TmaParams {
  TensorMap q[kPlanes], k[kPlanes], v[kPlanes], dout[kPlanes], dk, dv;
  Params params;
};

using QTile = PanelTile<kTile.block_m, kTile.head_dim>;
using DoutTile = PanelTile<kTile.block_m, kTile.value_dim>;
using KTile = PanelTile<kTile.block_n, kTile.head_dim>;
using VTile = PanelTile<kTile.block_n, kTile.value_dim>;
using DsTile = PanelTile<kTile.block_n, kTile.block_m>;  // transposed: rows are keys
using Scores = Fragment<1, kTile.block_m>;               // likewise
using DqHalf = Fragment<1, 64>;

// What query rows have of their own: lse and delta, or both as columns of products.
union RowVectors {
  struct {
    alignas(16) float lse[kTile.block_m], delta[kTile.block_m];
  };
  RowTerms terms[kSplitRows ? 1 : kTile.block_m];
};
// What consumers are to know of a step: the producer works it out, and it is there when q is. Of use until the products
// of dk are issued: after that q may be given up.
struct StepRecord {
  int row0;
  bool is_partial;  // some rows do not see some keys
  bool ends_batch;  // the last one at its batch position
  int vectors;      // block of row vectors
};
// dq in the order of its registers: of each warpgroup, its columns by eights, of each of those 16 bytes a thread.
struct DqSums {
  float x[kTile.block_m * kTile.head_dim];
};
union alignas(1024) SendBuffer {
  DqSums dq;
  KTile dk;
  VTile dv;
};
// What is to be in such a buffer, and where it goes from there.
struct Sending {
  enum { kDq, kPart, kDk, kDv, kNothing } what;
  DqPart part;       // of dq, or of half of a block of dk or dv
  int block, owned;  // rows and the position summed over, or, of dk and dv, keys and the owned position
};
// A block of dk or dv that several CTAs sum, each for one batch position or for some query rows, is summed as blocks of
// dq are. Such sums are as large: a warpgroup's 64 keys, or, at 64 features, those of both.
constexpr int kKeyHalves = kSplitRows ? 1 : 2;
static_assert(kTile.block_n * kTile.head_dim == kKeyHalves * kTile.block_m * kTile.head_dim);
static_assert(kTile.value_dim == kTile.head_dim);
struct KeyShare {
  int number;  // of the block of keys among those that are shared
  DqRole role;

  // Of query heads that read the same keys.
  __device__ __forceinline__ void locate(const Params& params, const KeyWork& work) {
    number = 0, role = {0, 1};
    const BatchIndex at = batch_index(params, work.owned, 0);
    const int extents[3] = {params.grid_extent0, params.grid_extent1, params.grid_extent2};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (params.dk_stride.batch[i] != 0) {
        number = number * extents[i] + at.i[i];
      } else {
        role = {role.rank * extents[i] + at.i[i], role.count * extents[i]};
      }
    }
    number = number * ceil_div(params.seqlen_k, kTile.block_n) + work.block;
  }
};
struct SharedStorage {
  Planes<KTile> k;
  Planes<VTile> v;
  Planes<QTile> q[kStages];
  Planes<DoutTile> dout[kStages];
  DsTile ds[kDsBuffers];
  SendBuffer send[kSendBuffers];
  RowVectors rows[kStages];
  StepRecord steps[kStages];
  BufferBarriers k_barriers, v_barriers, q_barriers[kStages], dout_barriers[kStages];
  u64 send_ready[kSendBuffers], send_filled[kSendBuffers], send_free[kSendBuffers];
  Sending sending[kSendBuffers];  // there from when the buffer is ready until it is free
  KeyWork work[kWorks];           // there when K is
  KeyShare shares[kWorks];        // likewise
  u32 is_careful;                 // likewise: whether some row of the call needs care
  KeySums dkey_bias;
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

// One thread.
__device__ __forceinline__ void produce(const TmaParams& tma, SharedStorage& smem) {
  const Params& params = tma.params;
  // The last tiles are taken in parts, of some query rows each, or most CTAs would wait for few in the end.
  // How many are whole is worked out each time: there is no register to keep it in.
  const auto whole_tiles = [&] { return tile_count(params) - params.split_tiles; };
  const int tiles = whole_tiles() + params.split_tiles * params.splits;
  // Each CTA's last claim is in vain: so the count is back at 0 in the end, for the next launch.
  const auto claim = [&] {
    const u32 last = tiles + gridDim.x - 1, claimed = atomicInc(params.claims, last);
    if (claimed == last) *params.careful = 0;  // all others have claimed before, and looked at this before that
    return int(claimed);
  };
  PipelineState<kStages> q;
  TileState state;
  grid_wait();  // row vectors are there, and whoever counted before is done
  smem.is_careful = load_acquire(params.careful);
  int tile = claim();
  for (;; state.next()) {
    const u32 parity = state.parity;
    KeyWork& work = smem.work[state.slot];
    if (tile >= tiles) {
      work.block = -1;
      mbarrier_wait(smem.k_barriers.empty, parity ^ 1);
      mbarrier_arrive(smem.k_barriers.full);
      return;
    }
    const int n_blocks = ceil_div(params.seqlen_k, kTile.block_n);
    const int whole = whole_tiles();
    KeyShare& share = smem.shares[state.slot];
    const auto locate = [&](int number) {
      work.locate(params, kNeedsDq && kDeterministic ? locate_section_rows(params, n_blocks, number)
                                                     : locate_in_section(params, n_blocks, number));
    };
    if (tile < whole) {
      locate(tile);
      share.locate(params, work);
    } else {
      const int split = (tile - whole) / params.splits;
      share = {split, {tile - whole - split * params.splits, params.splits}};
      locate(whole + split);
      work.take_part(share.role.rank, share.role.count);
    }
    if constexpr (kNeedsDq) work.first = first_row_block(params, work.rows, work.block, n_blocks);
    Step step(work);
    BatchIndex batch;
    i64 batch_at;  // of lse and delta
    const auto begin_batch = [&] {
      batch = batch_index(params, work.owned, step.summed);
      batch_at = offset(params.row_lse_stride, batch);
    };
    const auto fill_rows = [&] {
      const int row0 = step.block * kTile.block_m;
      const bool is_partial = !work.rows.is_full(step.block) || (work.block + 1) * kTile.block_n > params.seqlen_k;
      const bool ends_batch = step.next(work);
      mbarrier_wait(smem.q_barriers[q.stage].empty, q.parity ^ 1);  // the record, too, has been read
      const i64 at = batch_at + row0;
      smem.steps[q.stage] = {row0, is_partial, ends_batch, int(at / kTile.block_m)};
      const u32 nbytes = kTermsInProducts ? sizeof(RowVectors::terms) : sizeof(RowVectors::lse);
      const u32 delta_nbytes = kTermsInProducts ? 0 : sizeof(RowVectors::delta);
      RowVectors& rows = smem.rows[q.stage];
      BufferBarriers &of_q = smem.q_barriers[q.stage], &of_dout = smem.dout_barriers[q.stage];
      fill(smem.q[q.stage], of_q, q.parity, tma.q, row0, batch, params.q_stride, nbytes);
      if constexpr (kTermsInProducts) {
        bulk_load(rows.terms, static_cast<const RowTerms*>(params.row_terms) + at, nbytes, of_q.full);
      } else {
        bulk_load(rows.lse, params.row_lse + at, nbytes, of_q.full);
      }
      fill(smem.dout[q.stage], of_dout, q.parity, tma.dout, row0, batch, params.dout_stride, delta_nbytes);
      if constexpr (!kTermsInProducts) bulk_load(rows.delta, params.delta + at, delta_nbytes, of_dout.full);
      q.next();
      if (ends_batch) begin_batch();
    };
    begin_batch();
    // The first rows of a block of keys may come while the last ones of the block before still need K.
    const bool has_steps = work.steps > 0;
    const BatchIndex own_batch = batch;
    if (has_steps) fill_rows();
    fill(smem.v, smem.v_barriers, parity, tma.v, work.block * kTile.block_n, own_batch, params.v_stride);
    fill(smem.k, smem.k_barriers, parity, tma.k, work.block * kTile.block_n, own_batch, params.k_stride);
    for (int i = 1; i < work.steps; ++i) fill_rows();
    // Not before: whoever claims first is to begin first. Consumers have as many steps left as there are stages.
    tile = claim();
  }
}

__device__ __forceinline__ DqTurn* turns_of(const Params& params) { return reinterpret_cast<DqTurn*>(params.dq_turn); }
__device__ __forceinline__ float* sum_of(const Params& params, const DqPart& part) {
  return params.dq_accum + i64(part.number) * (sizeof(DqSums) / 4);
}

// One thread: hands buffers to the consumers, step by step and then for dk and dv. Where theirs is the last part of dq,
// the sum of the others is in it.
__device__ __forceinline__ void prepare_buffers(const Params& params, SharedStorage& smem) {
  DqTurn* const turns = turns_of(params);
  PipelineState<kSendBuffers> buffer;
  const auto prepare = [&](const Sending& sending) {
    mbarrier_wait(smem.send_free[buffer.stage], buffer.parity ^ 1);
    smem.sending[buffer.stage] = sending;
  };
  const auto give = [&](const Sending& sending) {
    prepare(sending);
    mbarrier_arrive(smem.send_ready[buffer.stage]);
    buffer.next();
  };
  for (TileState tile;; tile.next()) {
    mbarrier_wait(smem.k_barriers.full, tile.parity);
    mbarrier_arrive(smem.k_barriers.empty);
    const KeyWork& work = smem.work[tile.slot];
    if (work.block < 0) break;
    Step step(work);
    int batch_number;
    const auto begin_batch = [&] {
      batch_number = int(offset(params.dq_turn_stride, batch_index(params, work.owned, step.summed)));
    };
    begin_batch();
    const auto give_part = [&](const Sending& sending) {
      const DqPart& part = sending.part;
      if (!part.role.is_last() || part.role.is_first()) return give(sending);
      prepare(sending);
      DqTurn& turn = turns[part.number];
      await_parts(turn, part.role.rank);
      turn = DqTurn{};          // all others have drawn and counted: nobody looks any more
      fence_async_proxy_all();  // the copy engine reads what others' have written
      u64& ready = smem.send_ready[buffer.stage];
      mbarrier_arrive_expect(ready, sizeof(DqSums));
      bulk_load(&smem.send[buffer.stage], sum_of(params, part), sizeof(DqSums), ready);
      buffer.next();
    };
    const auto draw = [&](DqRole& role, int number) {
      if (!kDeterministic && role.count > 1) role.rank = atomicAdd(&turns[number].drawn, 1);
    };
    for (int left = kNeedsDq ? work.steps : 0; left > 0; --left) {
      DqPart part{ordered_role(params, work.block, step.block * kTile.block_m), batch_number + step.block};
      draw(part.role, part.number);
      const Sending sending{Sending::kDq, part, step.block, step.summed};
      if (step.next(work)) begin_batch();
      give_part(sending);
    }
    KeyShare share = smem.shares[tile.slot];
    int number = 0;
    if (kNeedsDq && share.role.count > 1) {
      const int positions = owned_count(params) * loop_count(params);
      number = positions * ceil_div(params.seqlen_q, kTile.block_m) + share.number * 2 * kKeyHalves;
      draw(share.role, number);  // once for all: who comes last of one comes last of each
    }
#pragma unroll
    for (const auto what : {Sending::kDv, Sending::kDk}) {
      if (kNeedsDq && share.role.count > 1) {
        for (int half = 0; half < kKeyHalves; ++half) give_part({Sending::kPart, {share.role, number++}, 0, 0});
        if (!share.role.is_last()) continue;
      }
      give({what, {}, work.block, work.owned});
    }
  }
  // Nobody fills these: the threads that send are to end.
#pragma unroll 1
  for (int i = 0; i < kSendBuffers; ++i) {
    mbarrier_wait(smem.send_free[buffer.stage], buffer.parity ^ 1);
    smem.sending[buffer.stage].what = Sending::kNothing;
    for (int arrival = 0; arrival < kConsumerWarps; ++arrival) mbarrier_arrive(smem.send_filled[buffer.stage]);
    buffer.next();
  }
}

template <class Tile>
__device__ __forceinline__ void store_tile(const TensorMap& map, const Tile& tile, int row0, const BatchIndex& batch,
                                           const Strides& stride) {
  int at[3];
  batch_on_map(at, batch, stride);
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel)
    tma_store(map, shared_address(&tile) + panel * Tile::kPanelBytes, 64 * panel, row0, at);
}

// With dq all gradients are asked for.
__device__ __forceinline__ bool is_needed(const Params& params, Need which) {
  return kNeedsDq || (params.need & which) != 0;
}

// One thread for each buffer, as a part of dq takes about as long as two steps until all see it: passes on what the
// consumers put there.
__device__ __forceinline__ void send_buffer(const TmaParams& tma, SharedStorage& smem, int number) {
  const Params& params = tma.params;
  const SendBuffer& buffer = smem.send[number];
  u64& free = smem.send_free[number];
  for (u32 parity = 0;; parity ^= 1) {
    mbarrier_wait(smem.send_filled[number], parity);
    // The copy engine is to see what all of them have written, and, also where nothing is sent, to write only after
    // they have read.
    fence_async_proxy();
    const Sending sending = smem.sending[number];
    if (sending.what == Sending::kNothing) return;
    if (!kNeedsDq || (sending.what != Sending::kDq && sending.what != Sending::kPart)) {
      const int row0 = sending.block * kTile.block_n;
      const BatchIndex batch = batch_index(params, sending.owned, 0);
      if (sending.what == Sending::kDk) {
        if (is_needed(params, kNeedK)) store_tile(tma.dk, buffer.dk, row0, batch, params.dk_stride);
      } else {
        if (is_needed(params, kNeedV)) store_tile(tma.dv, buffer.dv, row0, batch, params.dv_stride);
      }
      bulk_commit();
      bulk_wait_read<0>();
      mbarrier_arrive(free);
      continue;
    }
    const DqPart& part = sending.part;
    if (part.role.is_last()) {
      mbarrier_arrive(free);
      continue;
    }
    DqTurn& turn = turns_of(params)[part.number];
    if (part.role.is_first()) {
      bulk_store(sum_of(params, part), buffer.dq.x, sizeof(DqSums));
    } else {
      await_parts(turn, kDeterministic ? part.role.rank : 1);
      fence_async_proxy_all();  // the copy engine adds to what others' have written
      bulk_add(sum_of(params, part), buffer.dq.x, sizeof(DqSums));
    }
    bulk_commit();
    bulk_wait_read<0>();
    mbarrier_arrive(free);
    bulk_wait();
    fence_async_proxy_all();  // what the copy engine has written comes before the count
    add_release(&turn.done);
  }
}

// A warp's operand to its rows of a tile that has a row for each key, `at` the lane's row.
template <int kDepth>
__device__ __forceinline__ void store_operand(u32 at, const OperandA<kDepth>& x) {
  static_assert(KTile::kPanelBytes == DsTile::kPanelBytes && VTile::kPanelBytes == DsTile::kPanelBytes);
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) stmatrix_x4(DsTile::advance(at, 0, 16 * k), x.x[0][k]);
}

// One warpgroup: 64 keys of each block, and half of dq of each step.
__device__ __forceinline__ void consume(const TmaParams& tma, SharedStorage& smem) {
  const Params& params = tma.params;
  // The compiler is to see that warps do not part: it then keeps stages in uniform registers.
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128 - 1, 0);
  const int group_key0 = 64 * group, warp_key0 = group_key0 + warp_id() % 4 * 16;
  const auto release = [](u64& empty) {
    if (threadIdx.x % 128 == 0) mbarrier_arrive(empty);
  };
  const u32 ds_at = smem.ds[0].address(warp_key0 + lane_id() % 16, lane_id() / 16 * 8);
  const u32 dq_at = shared_address(&smem.send[0]) + group * (64 * 64 * 4) + 16 * (threadIdx.x % 128);
  // By a shuffle the compiler keeps it, where there are registers: the thread's number, from which it would work it out
  // each time, comes late.
  const int lane = kIsCramped ? lane_id() : __shfl_sync(kFullWarp, lane_id(), lane_id());
  TermFactors of_lse, of_delta;
  if constexpr (kTermsInProducts) of_lse.form(lane, false), of_delta.form(lane, true);
  PipelineState<kStages> q;
  PipelineState<kSendBuffers> buffer;
  int ds_buffer = 0;
  const auto await_buffer = [&] { mbarrier_wait(smem.send_ready[buffer.stage], buffer.parity); };
  const auto pass_buffer = [&] {
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(smem.send_filled[buffer.stage]);
    buffer.next();
  };
  Tangent tangent(params);
  LaneKeys keys(smem.dkey_bias);

  for (TileState tile;; tile.next()) {
    const u32 parity = tile.parity;
    mbarrier_wait(smem.k_barriers.full, parity);
    const KeyWork& work = smem.work[tile.slot];
    if (work.block < 0) return;
    const auto begin_keys = [&](int summed) {
      keys.begin(params, batch_index(params, work.owned, summed), work.block * kTile.block_n + warp_key0);
    };
    const auto finish_keys = [&](int summed) {
      keys.store_gradient(params, batch_index(params, work.owned, summed), work.block * kTile.block_n + warp_key0);
    };
    Fragment<1, kTile.head_dim> dk;
    Fragment<1, kTile.value_dim> dv;
    dk.clear(), dv.clear();
    if (work.steps == 0) {
      mbarrier_wait(smem.v_barriers.full, parity);
      barrier_sync<256>(1);  // all warps have read the record: none is left behind by more than a tile
      if constexpr (kKeyBias) {
#pragma unroll 1
        for (int summed = 0; summed < loop_count(params); ++summed) begin_keys(summed), finish_keys(summed);
      }
      release(smem.v_barriers.empty);
      release(smem.k_barriers.empty);
    } else {
      const int key0 = work.block * kTile.block_n;
      // Asked for of a step before its products are issued: beside those shared memory answers late.
      StepRecord step;
      const auto begin_step = [&] {
        mbarrier_wait(smem.q_barriers[q.stage].full, q.parity);
        step = smem.steps[q.stage];
      };
      int summed = 0;
      if constexpr (kKeyBias) begin_keys(0);
      begin_step();
      OperandA<16 * kHeldSteps> last_k;
      if constexpr (kTermsInProducts) load_operand(last_k, smem.k, warp_key0, kTile.head_dim - 16 * kHeldSteps);
      mbarrier_wait(smem.v_barriers.full, parity);
      int left = work.steps;
      const auto run_steps = [&](auto careful) {
        constexpr bool kCareful = decltype(careful)::value, kLessTerms = kTermsInProducts && !kCareful;
        do {
          const int stage = q.stage;
          const bool ends_batch = step.ends_batch;
          Scores s, dp;
          int scores_row0 = group_key0;
          asm volatile("" : "+r"(scores_row0));  // its descriptors are made again each time, not kept in local memory
          const RowVectors& rows = smem.rows[stage];
          if constexpr (kLessTerms) {
            issue_nt<kTile.head_dim, kHeldSteps>(s, smem.k, scores_row0, last_k.x[0], smem.q[stage], of_lse.x,
                                                 rows.terms);
            mbarrier_wait(smem.dout_barriers[stage].full, q.parity);
            issue_nt<kTile.value_dim, 0>(dp, smem.v, group_key0, nullptr, smem.dout[stage], of_delta.x, rows.terms);
          } else {
            issue_nt<kTile.head_dim>(s, smem.k, scores_row0, smem.q[stage]);
            mbarrier_wait(smem.dout_barriers[stage].full, q.parity);
            issue_nt<kTile.value_dim>(dp, smem.v, group_key0, smem.dout[stage]);
          }
          wgmma_wait<1>(s);
          const bool is_careful = kTwoLoops    ? kCareful
                                  : kIsCramped ? any_is_large<kTile.block_m>(rows.lse)
                                               : smem.is_careful != 0;
          if constexpr (kSoftcap) {
            tangent.apply<false, 32>(s, is_careful);
          } else if constexpr (kKeyBias) {
            keys.add(s, params.scale);
          }
          if (step.is_partial || (kKeyBias && keys.any_is_absent())) {
            const int row0 = smem.steps[stage].row0;  // seldom wanted: read again, not kept
            mask_by_row_limits(s, params, key0 + warp_key0, row0, [&](int r) { return kKeyBias && keys.is_absent(r); });
            mask_beyond_length(s, params, row0);
          }
          const auto columns = [&](const float* in_smem, const float* in_gmem) {
            if constexpr (kTermsInProducts) {
              return FarLaneColumns<kTile.block_m>(in_gmem + i64(smem.steps[stage].vectors) * kTile.block_m);
            } else {
              return LaneColumns<kTile.block_m>(in_smem, lane);
            }
          };
          OperandA<kTile.block_m> p, ds;
          const auto await_dp = [&] {
            wgmma_wait<0>(dp);
            if (left == 1) release(smem.v_barriers.empty);
          };
          if constexpr (kSoftcap) {
            await_dp();
            tanh_to_p_and_ds(s, dp, params, rows.lse, rows.delta, is_careful, keys, p, ds);
          } else {
            const auto form_early = [&](auto large) {
              constexpr bool kLarge = decltype(large)::value;
              scores_to_exponents<kLarge>(s, params, columns(rows.lse, params.row_lse));
              exponents_to_p<0, kEarlyColumns>(s);
            };
            if constexpr (kLessTerms) {
              s.for_each([&](float& x, int, int, int) { x *= params.exponent_scale; });
              exponents_to_p<0, kEarlyColumns>(s);
            } else if (is_careful) {
              // The early columns in both branches: in one place behind them, ptxas would put them behind the wait,
              // too.
              form_early(Flag<true>{});
            } else {
              form_early(Flag<false>{});
            }
            await_dp();
            exponents_to_p<kEarlyColumns, kTile.block_m>(s);
            if constexpr (kLessTerms) {
              dp.for_each_with(s, [](float& x, float& p_of, int, int, int) { x *= p_of; });
            } else if constexpr (kKeyBias) {
              dp_to_ds(dp, s, columns(rows.delta, params.delta), keys);
            } else {
              dp_to_ds(dp, s, columns(rows.delta, params.delta));
            }
            ds.from(dp);
            p.from(s);
          }
          // Before the products of dv, which would delay it. What others wait for comes first.
          if constexpr (kNeedsDq) store_operand(ds_at + ds_buffer * sizeof(DsTile), ds);
          issue_nn(dv, p, smem.dout[stage]);
          q.next();
          if constexpr (kNeedsDq) {
            fence_async_proxy();   // wgmma is to see it
            barrier_sync<256>(1);  // ds of all keys is complete; nobody reads the other buffer any more
            DqHalf dq;
            issue_tn<kTile.block_n>(dq, smem.ds[ds_buffer], kSplitRows ? group : 0, smem.k[0], kSplitRows ? 0 : group);
            ds_buffer ^= 1;
            if (kBeginsEarly && left > 1) begin_step();
            issue_nn(dk, ds, smem.q[stage]);
            await_buffer();
            const Sending& sending = smem.sending[buffer.stage];
            const DqRole role = sending.part.role;
            wgmma_wait<1>(dq);
            release(smem.dout_barriers[stage].empty);
            if (left == 1) release(smem.k_barriers.empty);
            const u32 at = dq_at + buffer.stage * sizeof(SendBuffer);
            const int columns = kSplitRows || kTile.head_dim == 128 ? 64 : min_of(64, kTile.head_dim - 64 * group);
            if (role.is_last()) {
              if (!role.is_first()) {
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                  if (8 * n >= columns) break;
                  float others[4];
                  ld_shared(others, at + 2048 * n);
#pragma unroll
                  for (int i = 0; i < 4; ++i) dq.x[0][n][i] += others[i];
                }
              }
              const BatchIndex batch = batch_index(params, work.owned, sending.owned);
              const int row0 = sending.block * kTile.block_m + (kSplitRows ? group_key0 : 0) + warp_id() % 4 * 16;
              dq.for_each([&](float& x, int, int, int) { x *= params.scale; });
              const int col0 = kSplitRows ? 0 : 64 * group;
              store_rows_direct(dq, base<Output>(params.dq, params.dq_stride, batch) + col0 * params.dq_stride.col,
                                params.dq_stride, row0, params.seqlen_q, params.head_dim - col0,
                                params.store_vector != 0);
            } else {
#pragma unroll
              for (int n = 0; n < 8; ++n) {
                if (8 * n >= columns) break;
                st_shared(at + 2048 * n, dq.x[0][n]);
              }
            }
            pass_buffer();
            if (!kBeginsEarly && left > 1) begin_step();
          } else {
            issue_nn(dk, ds, smem.q[stage]);
            if (left > 1) begin_step();
            if (left == 1) release(smem.k_barriers.empty);
          }
          wgmma_wait<0>(dk);
          wgmma_wait<0>(dv);
          // Not before: other warps may read delta until they issue the products of dk.
          if constexpr (!kNeedsDq) release(smem.dout_barriers[stage].empty);
          if (kKeyBias && ends_batch) {
            finish_keys(summed++);
            if (left > 1) begin_keys(summed);
          }
          release(smem.q_barriers[stage].empty);
        } while (--left > 0);
      };
      if (kTwoLoops && smem.is_careful) {
        run_steps(Flag<true>{});
      } else {
        run_steps(Flag<false>{});
      }
    }
    const auto send = [&]<int kCols>(Fragment<1, kCols>& gradient) {
      await_buffer();
      if (kNeedsDq && smem.sending[buffer.stage].what == Sending::kPart) {
        const DqRole role = smem.sending[buffer.stage].part.role;
#pragma unroll 1
        for (int half = 0; half < kKeyHalves; ++half) {
          if (half > 0) await_buffer();
          const u32 at = dq_at + buffer.stage * sizeof(SendBuffer) - (kSplitRows ? 0 : group * (64 * 64 * 4));
          if (kSplitRows || group == half) {
#pragma unroll
            for (int n = 0; n < kCols / 8; ++n) {
              if (role.is_last()) {
                float others[4];
                ld_shared(others, at + 2048 * n);
#pragma unroll
                for (int i = 0; i < 4; ++i) gradient.x[0][n][i] += others[i];
              } else {
                st_shared(at + 2048 * n, gradient.x[0][n]);
              }
            }
          }
          pass_buffer();
        }
        if (!role.is_last()) return;
        await_buffer();
      }
      OperandA<kCols> rounded;
      rounded.from(gradient);
      store_operand(shared_address(&smem.send[buffer.stage]) + (ds_at - shared_address(&smem.ds[0])), rounded);
      pass_buffer();
    };
    send(dv);
    dk.for_each([&](float& x, int, int, int) { x *= params.scale; });
    send(dk);
  }
}

__device__ __forceinline__ void attention_backward(const TmaParams& tma, SharedStorage& smem) {
  if (threadIdx.x == 0) {
    smem.k_barriers.start(kConsumers + 1);  // and by whoever prepares buffers, who reads the record
    smem.v_barriers.start(kConsumers);
    for (int i = 0; i < kStages; ++i) smem.q_barriers[i].start(kConsumers), smem.dout_barriers[i].start(kConsumers);
    for (int i = 0; i < kSendBuffers; ++i) {
      mbarrier_init(smem.send_ready[i], 1);
      mbarrier_init(smem.send_filled[i], kConsumerWarps);
      mbarrier_init(smem.send_free[i], 1);
    }
    mbarrier_publish();
  }
  __syncthreads();  // the barriers are there
  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) produce(tma, smem);
    if (threadIdx.x == 32) prepare_buffers(tma.params, smem);
    static_assert(kSendBuffers == 2, "a warp for each");
    if (threadIdx.x == 64 || threadIdx.x == 96) send_buffer(tma, smem, threadIdx.x / 32 - 2);
    if (kNeedsDq && warp_id() == 2) clear_dq(tma.params);
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    consume(tma, smem);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * cuflash::kTile.warps, 1)
    KERNEL(const __grid_constant__ cuflash::TmaParams params) {
  extern __shared__ __align__(1024) char smem[];
  cuflash::attention_backward(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
