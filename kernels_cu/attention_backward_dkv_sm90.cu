// Backward of keys and values for sm_90a, of more features than leave room for dq beside them: a CTA owns a block of
// keys and its values, and query blocks stream by, brought by the copy engine. Of its two warpgroups one forms
//   s^T = K Q^T,  p = exp(s - lse),  dV += p^T dO,
// the other one
//   dp^T = V dO^T,  ds = p (dp - delta),  dK += ds^T Q,
// with the same thread at the same place of p, which the first one leaves in shared memory for it. Each issues what it
// adds to its gradient and its next product together: while these are formed, the other one works on its elements.
// CTAs stay and claim one block of keys after another. A CTA sums dk and dv over the batch axes on which k and v
// were broadcast, in a fixed order: no atomics. dkey_bias it sums over query rows alone: key_bias may be broadcast on
// other axes than k.
//
// With a softcap the first one leaves tanh in the place of p, and the second one, which needs that for the slope, forms
// p again: the same bytes go through shared memory.
#include "gemm_sm90.cuh"
#include "terms_backward_sm90.cuh"
#include "key_work_sm90.cuh"
#include "mask.cuh"
#include "pipeline_sm90.cuh"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "recompute_sm90.cuh"
#include "store_direct.cuh"

namespace cuflash {

// Of each thread: all of 504. Score terms beside sums of 256 columns leave the producer what it can do with.
constexpr int kProducerRegisters = kKeyBias && kTile.head_dim > 192 ? 24 : 40,
              kConsumerRegisters = (504 - kProducerRegisters) / 2;
constexpr int kSlots = 2 * kTile.stages;
constexpr int kExchanges = 2;
constexpr int kWarps = 4;  // of a warpgroup
static_assert(kTile.stages > 1, "dO of a step takes the slot of Q of another, which is held until the step after");
constexpr bool kTerms = kKeyBias;
// Steps of the products of K and V that have them in registers, as reads of shared memory are what is full here: as
// many as were fastest. Score terms leave no registers.
constexpr int kHeldSteps = kTerms ? 0 : kTile.head_dim > 192 ? 4 : 5;
static_assert(kSoftcap == kTerms, "one kernel serves all terms");
static_assert(kTile.block_m == 64 && kTile.block_n == 64 && kTile.warps == 3 * kWarps);
static_assert(kRowPadding % kTile.block_m == 0, "tiles of row vectors load whole");

// cuflash/params.py puts the maps before the rest.
struct TmaParams {
  TensorMap q[kPlanes], k[kPlanes], v[kPlanes], dout[kPlanes];
  Params params;
};

using QTile = PanelTile<kTile.block_m, kTile.head_dim>;
using DoutTile = PanelTile<kTile.block_m, kTile.value_dim>;
using KTile = PanelTile<kTile.block_n, kTile.head_dim>;
using VTile = PanelTile<kTile.block_n, kTile.value_dim>;
using Scores = Fragment<1, kTile.block_m>;  // transposed: rows are keys
using RowColumns = ConditionalType<kTerms, LaneColumns<kTile.block_m>, KeptColumns<kTile.block_m>>;

union alignas(1024) Slot {
  Planes<QTile> q;
  Planes<DoutTile> dout;
};

// Slots are used in turns, and each by Q and dO in turns: Q is held for one step and a half, as it is multiplied first
// and last, dO for half a step. So either finds a slot that has been free for a step.
struct SlotState {
  int q = 0;

  __device__ __forceinline__ int dout() const { return q < kTile.stages ? q + kTile.stages : q - kTile.stages; }
  __device__ __forceinline__ u32 parity() const { return q >= kTile.stages; }  // of both
  __device__ __forceinline__ void next() { q = q + 1 == kSlots ? 0 : q + 1; }
};

// What a warp of the first warpgroup leaves for one of the second, in the order of its registers, 16 bytes a lane at a
// time: p, or with a softcap tanh. Without score terms p comes in half precision, for half the traffic, and times
// kHalfScale: so it has 11 bits from 2^-26 on, as ds is to have at most, and 4, which is the most that rounding makes
// of p where lse is not large (exponent), does not overflow.
constexpr float kHalfScale = 4096;
struct alignas(16) Exchange {
  float x[kTile.block_m / 8][32][4];

  __device__ __forceinline__ u32 address() const { return shared_address(x) + 16 * lane_id(); }
  __device__ __forceinline__ void store(const Scores& p) const {
#pragma unroll
    for (int n = 0; n < kTile.block_m / 8; ++n) st_shared(address() + 512 * n, p.x[0][n]);
  }
  __device__ __forceinline__ void load(Scores& p) const {
#pragma unroll
    for (int n = 0; n < kTile.block_m / 8; ++n) load(p.x[0][n], n);
  }
  __device__ __forceinline__ void load(float (&p)[4], int n) const { ld_shared(p, address() + 512 * n); }
  __device__ __forceinline__ void store_half(const Scores& p) const {
#pragma unroll
    for (int n = 0; n < kTile.block_m / 16; ++n) {
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &p.x[0][2 * n + i / 2][i % 2 * 2];
        pairs[i] = cvt_x2(pair[0] * kHalfScale, pair[1] * kHalfScale, Half{});
      }
      st_shared(address() + 512 * n, pairs);
    }
  }
  // Times kHalfScale as it is.
  __device__ __forceinline__ void load_half(Scores& p) const {
#pragma unroll
    for (int n = 0; n < kTile.block_m / 16; ++n) {
      u32 pairs[4];
      ld_shared(pairs, address() + 512 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* pair = &p.x[0][2 * n + i / 2][i % 2 * 2];
        to_floats(pair[0], pair[1], pairs[i], Half{});
      }
    }
  }
};

// ds / scale = p (dp - delta), of p times kHalfScale.
template <class Columns>
__device__ __forceinline__ void dp_to_ds_by_half(Scores& dp, Scores& p, const Columns& delta) {
  constexpr float kFactor = 1 / kHalfScale;
  for_each_of_rows(dp, p, delta,
                   [](float& x, float& p_of, float of_row, int) { x = p_of * fmaf(x, kFactor, -(of_row * kFactor)); });
}

struct SharedStorage {
  Planes<KTile> k;
  Planes<VTile> v;
  Slot slots[kSlots];
  Exchange exchange[kExchanges][kWarps];
  alignas(16) float rows[kSlots][kTile.block_m];  // lse beside Q, delta beside dO
  BufferBarriers k_barriers, v_barriers, slot_barriers[kSlots], exchange_barriers[kExchanges][kWarps];
  KeyWork work[kWorks];  // there when K or V is
  KeySums dkey_bias;
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

// One thread.
__device__ __forceinline__ void produce(const TmaParams& tma, SharedStorage& smem) {
  const Params& params = tma.params;
  const int tiles = tile_count(params);
  // Each CTA's last claim is in vain: so the count is back at 0 in the end, for the next launch.
  const auto claim = [&] { return int(atomicInc(params.claims, tiles + gridDim.x - 1)); };
  SlotState slot;
  TileState state;
  grid_wait();  // row vectors are there, and whoever counted before is done
  int tile = claim();
  for (;; state.next()) {
    const u32 parity = state.parity;
    KeyWork& work = smem.work[state.slot];
    if (tile >= tiles) {
      work.block = -1;
      work.steps = 0;
      mbarrier_wait(smem.k_barriers.empty, parity ^ 1);
      mbarrier_arrive(smem.k_barriers.full);
      mbarrier_wait(smem.v_barriers.empty, parity ^ 1);
      mbarrier_arrive(smem.v_barriers.full);
      return;
    }
    work.locate(params, locate_in_section(params, ceil_div(params.seqlen_k, kTile.block_n), tile));
    Step step(work);
    BatchIndex batch;
    i64 batch_at;  // of lse and delta
    const auto begin_batch = [&] {
      batch = batch_index(params, work.owned, step.summed);
      batch_at = offset(params.row_lse_stride, batch);
    };
    const auto fill_slot = [&](int number, auto& tile_smem, const TensorMap(&map)[kPlanes], const Strides& stride,
                               const float* vector) {
      const int row0 = step.block * kTile.block_m;
      fill(tile_smem, smem.slot_barriers[number], slot.parity(), map, row0, batch, stride, sizeof(smem.rows[0]));
      bulk_load(smem.rows[number], vector + batch_at + row0, sizeof(smem.rows[0]), smem.slot_barriers[number].full);
    };
    begin_batch();
    // In the order in which the tile before gives room.
    const bool has_steps = work.steps > 0;
    bool begins = true;
    int left = work.steps;
    do {
      if (has_steps) fill_slot(slot.q, smem.slots[slot.q].q, tma.q, params.q_stride, params.row_lse);
      if (begins) fill(smem.k, smem.k_barriers, parity, tma.k, work.block * kTile.block_n, batch, params.k_stride);
      if (has_steps) fill_slot(slot.dout(), smem.slots[slot.dout()].dout, tma.dout, params.dout_stride, params.delta);
      if (begins) fill(smem.v, smem.v_barriers, parity, tma.v, work.block * kTile.block_n, batch, params.v_stride);
      if (!has_steps) break;
      begins = false;
      slot.next();
      if (step.next(work)) begin_batch();
    } while (--left > 0);
    // Not before: whoever claims is to begin soon. Consumers have as many steps left as there are stages.
    tile = claim();
  }
}

// What a step asks of shared memory, where it would be answered late.
struct Prepared {
  RowColumns of_rows;
  bool is_masked, is_large;
};

// A warpgroup's: either p and dv, or ds and dk.
template <bool kOfValues>
__device__ __forceinline__ void consume(const TmaParams& tma, SharedStorage& smem) {
  constexpr int kDepth = kOfValues ? kTile.head_dim : kTile.value_dim,
                kCols = kOfValues ? kTile.value_dim : kTile.head_dim;
  const Params& params = tma.params;
  const int warp = warp_id() % kWarps, warp_key0 = 16 * warp;
  BufferBarriers& own_barriers = kOfValues ? smem.k_barriers : smem.v_barriers;
  const auto release = [](u64& empty) {
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(empty);
  };
  SlotState slot;
  PipelineState<kExchanges> exchange;
  const auto factor_slot = [&] { return kOfValues ? slot.q : slot.dout(); };
  const auto sum_slot = [&] { return kOfValues ? slot.dout() : slot.q; };
  const auto await_slot = [&](int number) { mbarrier_wait(smem.slot_barriers[number].full, slot.parity()); };
  Scores s;  // or dp
  OperandA<16 * max_of(kHeldSteps, 1)> held;
  const auto factor = [&]() -> const auto& {
    if constexpr (kOfValues) {
      return smem.k;
    } else {
      return smem.v;
    }
  };
  const auto issue_product = [&] {
    const Slot& slot = smem.slots[factor_slot()];
    if constexpr (kOfValues) {
      issue_nt<kDepth, kHeldSteps>(s, factor(), 0, held.x[0], slot.q);
    } else {
      issue_nt<kDepth, kHeldSteps>(s, factor(), 0, held.x[0], slot.dout);
    }
  };
  Tangent tangent(params);
  LaneKeys keys(smem.dkey_bias);
  TileState tile;
  // Whether there is a tile. Its first product is issued in any case: under a condition, the compiler would wait for
  // each part of it. Where there is none it is of what lies in shared memory, and nobody looks.
  const auto start_tile = [&] {
    mbarrier_wait(own_barriers.full, tile.parity);
    const KeyWork& work = smem.work[tile.slot];
    if constexpr (kHeldSteps > 0) load_operand(held, factor(), warp_key0, kDepth - 16 * kHeldSteps);
    if (work.steps > 0) await_slot(factor_slot());
    issue_product();
    return work.block >= 0;
  };

  bool is_tile = start_tile();
  while (is_tile) {
    const KeyWork work = smem.work[tile.slot];
    const int key0 = work.block * kTile.block_n, owned = work.owned;
    Fragment<1, kCols> sums;
    sums.clear();
    const auto begin_keys = [&](int summed) {
      const BatchIndex batch = batch_index(params, work.owned, summed);
      if constexpr (kOfValues) {
        keys.load(params, batch, key0 + warp_key0);
      } else {
        keys.begin(params, batch, key0 + warp_key0);
      }
    };
    const auto finish_keys = [&](int summed) {
      if (!kOfValues && (params.need & kNeedKeyBias))
        keys.store_gradient(params, batch_index(params, work.owned, summed), key0 + warp_key0);
    };
    if (work.steps == 0) {
      if constexpr (kTerms && !kOfValues) {
#pragma unroll 1
        for (int summed = 0; summed < loop_count(params); ++summed) begin_keys(summed), finish_keys(summed);
      }
      wgmma_wait<0>(s);
      release(own_barriers.empty);
    } else {
      Step step(work);
      int left = work.steps;
      if constexpr (kTerms) begin_keys(0);
      // Under the product, what is waited for before elements are worked on: of those of the first warpgroup a step is
      // as long as they take.
      const auto prepare = [&]() -> Prepared {
        const float* rows = smem.rows[factor_slot()];
        const bool is_masked = !work.rows.is_full(step.block) || key0 + kTile.block_n > params.seqlen_k;
        if constexpr (!kOfValues) return {RowColumns(rows), is_masked, false};
        await_slot(sum_slot());
        mbarrier_wait(smem.exchange_barriers[exchange.stage][warp].empty, exchange.parity ^ 1);
        return {RowColumns(rows), is_masked, any_is_large<kTile.block_m>(rows)};
      };
      Prepared prepared = prepare();
      wgmma_wait<0>(s);
      while (true) {
        if (left == 1) release(own_barriers.empty);
        const float* rows = smem.rows[factor_slot()];
        const int row0 = step.block * kTile.block_m;
        const bool large = prepared.is_large;
        BufferBarriers& barriers = smem.exchange_barriers[exchange.stage][warp];
        const Exchange& exchanged = smem.exchange[exchange.stage][warp];
        OperandA<kTile.block_m> operand;
        if constexpr (kOfValues) {
          if (is_capped(params)) {
            tangent.apply<false, 32>(s, large);
          } else if constexpr (kTerms) {
            keys.add(s, params.scale);
          }
          if (prepared.is_masked || (kTerms && keys.any_is_absent())) {
            mask_by_row_limits(s, params, key0 + warp_key0, row0, [&](int r) { return kTerms && keys.is_absent(r); });
            mask_beyond_length(s, params, row0);
          }
          if (is_capped(params)) {
            tanh_to_p(s, params, rows, large, keys, operand);
          } else {
            if (large) {
              scores_to_p<true>(s, params, prepared.of_rows);
            } else {
              scores_to_p<false>(s, params, prepared.of_rows);
            }
            operand.from(s);
          }
        } else {
          mbarrier_wait(barriers.full, exchange.parity);
          if (is_capped(params)) {
            await_slot(sum_slot());  // lse lies beside Q
            const float* lse = smem.rows[sum_slot()];
            const auto load_tanh = [&](float (&tanh)[4], int n) { exchanged.load(tanh, n); };
            tanh_to_ds(load_tanh, s, params, lse, rows, any_is_large<kTile.block_m>(lse), keys, operand);
            release(barriers.empty);
          } else {
            Scores p;
            if constexpr (kTerms) {
              exchanged.load(p);
              dp_to_ds(s, p, prepared.of_rows, keys);
            } else {
              exchanged.load_half(p);
              dp_to_ds_by_half(s, p, prepared.of_rows);
            }
            release(barriers.empty);
            operand.from(s);
          }
        }
        release(smem.slot_barriers[factor_slot()].empty);
        if constexpr (!kOfValues) await_slot(sum_slot());
        u64& sum_empty = smem.slot_barriers[sum_slot()].empty;
        if constexpr (kOfValues) {
          issue_nn(sums, operand, smem.slots[sum_slot()].dout);
          // Under the product: the other warpgroup has one of its own to wait for.
          if constexpr (kTerms) {
            exchanged.store(s);
          } else {
            exchanged.store_half(s);
          }
          release(barriers.full);
        } else {
          issue_nn(sums, operand, smem.slots[sum_slot()].q);
        }
        exchange.next();
        slot.next();
        if (step.next(work) && kTerms) {
          finish_keys(step.summed - 1);
          if (left > 1) begin_keys(step.summed);
        }
        if (--left == 0) {
          wgmma_wait<0>(sums);
          release(sum_empty);
          break;
        }
        await_slot(factor_slot());
        issue_product();
        wgmma_wait<1>(sums);
        release(sum_empty);
        prepared = prepare();
        wgmma_wait<0>(s);
      }
    }
    tile.next();
    is_tile = start_tile();  // formed while the gradient is stored
    if (!(params.need & (kOfValues ? kNeedV : kNeedK))) continue;
    if (!kOfValues) sums.for_each([&](float& x, int, int, int) { x *= params.scale; });
    const Strides& stride = kOfValues ? params.dv_stride : params.dk_stride;
    store_rows_direct(sums, base<Output>(kOfValues ? params.dv : params.dk, stride, batch_index(params, owned, 0)),
                      stride, key0 + warp_key0, params.seqlen_k, kOfValues ? params.value_dim : params.head_dim,
                      params.store_vector != 0);
  }
  wgmma_wait<0>(s);
}

__device__ __forceinline__ void attention_backward(const TmaParams& tma, SharedStorage& smem) {
  if (threadIdx.x == 0) {
    smem.k_barriers.start(kWarps);
    smem.v_barriers.start(kWarps);
    for (int i = 0; i < kSlots; ++i) smem.slot_barriers[i].start(2 * kWarps);
    for (int i = 0; i < kExchanges; ++i)
      for (int warp = 0; warp < kWarps; ++warp) smem.exchange_barriers[i][warp].start(1);
    mbarrier_publish();
  }
  __syncthreads();  // the barriers are there
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) produce(tma, smem);
  } else if (warpgroup == 1) {
    warpgroup_reg_alloc<kConsumerRegisters>();
    consume<true>(tma, smem);
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    consume<false>(tma, smem);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * cuflash::kTile.warps, 1)
    KERNEL(const __grid_constant__ cuflash::TmaParams params) {
  extern __shared__ __align__(1024) char smem[];
  cuflash::attention_backward(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
