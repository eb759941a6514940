// Forward of a single query over few features: memory bounds it. Every lane sums keys of its own, against a reference
// of its own, straight from global memory; the grid shares out the keys. Rows of K and V lie one after the other and
// lanes take them in whole vectors. Lanes and warps are merged at the end, the grid's parts by the CTA that is last.
//
// A lane bets that its reference need not move: the exponents come straight out of the multiply-adds, and the sum of p
// tells. If it loses, it does the same keys again, which it still holds, in natural units.
//
// The outline is host.py's: locate; key blocks; load q; step; finish; epilogue.
#include "bases.cuh"
#include "dense_keys.cuh"
#include "merge_splits.cuh"
#include "narrow_totals.cuh"
#include "score.cuh"

namespace cuflash {

constexpr int kFeatures = kTile.head_dim, kWarps = kTile.warps, kThreads = 32 * kWarps;
static_assert(kTile.value_dim == kFeatures);
constexpr int kUnitKeys = unit_keys(kFeatures * int(sizeof(Operand)), 16);
constexpr int kBlockKeys = 32 * kUnitKeys;  // a unit for each lane of a warp
constexpr int kAhead = kTile.stages;        // blocks of a warp that are loaded before the first is waited for

using LaneRow = RowSums<kFeatures>;

struct SharedStorage {
  LaneRow warps[kWarps];
};

struct Lane {
  LaneRow row;
  Accumulator start = pos_inf();  // as in WarpTotals
  Accumulator q[kFeatures];       // times scale * log2(e)
  Exp2 exp2_;

  __device__ __forceinline__ Lane() : exp2_(lane_id()) {}

  // Adds the keys, or returns false and has changed nothing. By whole warps.
  __device__ __forceinline__ bool bet(const DenseRows& k, const DenseRows& v, const Accumulator (&bias)[kUnitKeys]) {
    Accumulator p[kUnitKeys], sum = 0;
    bool lost = false;
#pragma unroll
    for (int i = 0; i < kUnitKeys; ++i) {
      Accumulator x = fma(bias[i], kLog2E, start);
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) x = fma(q[f], k.at(i, f), x);
      lost |= Bet::exponent_loses(x);
      p[i] = exp2_.flushed(x);
      sum = i == 0 ? p[i] : sum + p[i];
    }
    if (lost || Bet::sum_loses<kStepLimit>(sum)) return false;
    row.sums[0] += sum;
#pragma unroll
    for (int f = 0; f < kFeatures; ++f)
#pragma unroll
      for (int i = 0; i < kUnitKeys; ++i) row.sums[1 + f] = fma(p[i], v.at(i, f), row.sums[1 + f]);
    return true;
  }

  // Adds keys of which some may be absent: their bias is -inf.
  template <int kKeys, class K, class V>
  __device__ __forceinline__ void careful(const Params& params, const Operand* q_gmem, const K& k, const V& v,
                                          const Accumulator (&bias)[kKeys]) {
    Accumulator s[kKeys] = {}, max = neg_inf();
    bool foldable = true;
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) {
      const Accumulator own = to_float(q_gmem[f * params.q_stride.col]);
      foldable &= fabs(q[f]) < pos_inf();
#pragma unroll
      for (int i = 0; i < kKeys; ++i) s[i] = fma(own, k.at(i, f), s[i]);
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      s[i] = apply_terms(params, s[i], bias[i]).value;
      max = larger(max, s[i]);
    }
    if (Reference::moves(row.max, max, kLog2E)) row.move_to(max, LaneExp2{});
    const Reference reference(row.max, kLog2E);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const Accumulator p =
          LaneExp2{}(reference.is_large() ? (s[i] - reference.m) * kLog2E : fma(s[i], kLog2E, -reference.mc));
      row.sums[0] += p;
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) row.sums[1 + f] = fma(p, v.at(i, f), row.sums[1 + f]);
    }
    start = foldable ? start_of(row.max) : quiet_nan();  // q leaves no room for the factor
  }
};

__device__ __forceinline__ void attention_one_query(const Params& params, SharedStorage& smem) {
  const SplitWork work = locate_split_rows(1, 1, params.splits);
  const Bases bases = bases_of(params, work.owned);
  const Operand *q_gmem = bases.q, *k_gmem = bases.k;
  // For lse alone K stands where V would, and what is made of it is not stored.
  const Operand* v_gmem = params.value_dim > 0 ? bases.v : k_gmem;
  const KeyBias key_bias{bases.key_bias, params.key_bias_stride.row};
  const int begin = max_of(0, params.band_lo), end = min_of(params.seqlen_k, params.band_hi + 1);

  // Blocks lie so that their vectors are aligned, which the launch knows to be possible: the first may begin before
  // key 0.
  int origin = 0;
  while (origin > -kUnitKeys && (u64(k_gmem) + i64(origin) * kFeatures * sizeof(Operand)) % 16 != 0) --origin;
  const int first = (begin - origin) / kBlockKeys, count = end > begin ? ceil_div(end - origin, kBlockKeys) - first : 0;
  const SplitBlocks part(first, count, work.split, params.splits);

  Lane lane;
  const auto key_of = [&](int block) { return origin + block * kBlockKeys + lane_id() * kUnitKeys; };
  const auto is_whole = [&](int block) {
    const i64 key = origin + i64(block) * kBlockKeys;
    return block < part.end && key >= begin && key + kBlockKeys <= end;
  };
#pragma unroll 1
  for (int block = part.begin + warp_id(); block < part.end; block += kAhead * kWarps) {
    DenseRows k[kAhead], v[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (is_whole(block + j * kWarps)) {
        k[j].load(k_gmem + i64(key_of(block + j * kWarps)) * kFeatures);
        v[j].load(v_gmem + i64(key_of(block + j * kWarps)) * kFeatures);
      }
    if (block == part.begin + warp_id()) {  // the keys are on their way
#pragma unroll
      for (int f = 0; f < kFeatures; ++f)
        lane.q[f] = to_float(q_gmem[f * params.q_stride.col]) * (params.scale * kLog2E);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int own = block + j * kWarps;
      if (own >= part.end) break;
      const int key = key_of(own);
      if (is_whole(own)) {
        Accumulator bias[kUnitKeys];
#pragma unroll
        for (int i = 0; i < kUnitKeys; ++i) bias[i] = key_bias.value(key + i);
        if (!lane.bet(k[j], v[j], bias)) lane.careful(params, q_gmem, k[j], v[j], bias);
        continue;
      }
#pragma unroll 1
      for (int i = max_of(key, begin); i < min_of(key + kUnitKeys, end); ++i) {
        const Accumulator bias[1] = {key_bias.value(i)};
        lane.careful(params, q_gmem, OneRow(k_gmem + i64(i) * kFeatures), OneRow(v_gmem + i64(i) * kFeatures), bias);
      }
      __syncwarp();
    }
  }

  bool whole = params.splits == 1;  // the lanes have the whole row
#pragma unroll 1
  for (;;) {
    merge_threads(lane.row, smem.warps, true);
    if (whole) break;
    if (threadIdx.x == 0) store_split(params, work.owned, work.split, 0, lane.row);
    if (!is_last_split(params.claims[work.owned], params.splits)) return;
    lane.row = {};
#pragma unroll 1
    for (int split = threadIdx.x; split < params.splits; split += kThreads)
      lane.row.merge(load_split<kFeatures>(params, work.owned, split, 0));
    whole = true;
  }
  if (threadIdx.x == 0) store_row(params, work.owned, 0, 0, lane.row);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kTile.resident)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  __shared__ cuflash::SharedStorage smem;
  cuflash::attention_one_query(params, smem);
}
