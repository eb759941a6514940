// The rows of one warp where features are few and keys come in raw tiles: every lane holds all rows whole and takes
// keys of its own, as in narrow_rows.cuh. Bets that no reference has to move are on whole tiles here, a warp's first
// against the maxima of its first step: sums are set aside before a tile, no step of it looks at anything, and
// exponentials, scores and products with V of different keys fill one another's gaps. The sums tell at the end of the
// tile; if the bet is lost, the tile is done again step by step. Of those a step whose bet is lost moves the references
// to its maxima and bets again; only then comes the careful one.
#pragma once
#include "key_lanes_sm90.cuh"
#include "narrow_totals.cuh"
#include "score.cuh"

namespace cuflash {

constexpr int kTileLimit = 16;  // of a lane's sum since the last flush, as an exponent of 2

template <int kRows>
class NarrowRows {
 public:
  using Totals = WarpTotals<kRows, kFeatures>;
  using Sums = LaneSums<kRows, kFeatures>;

  __device__ __forceinline__ NarrowRows(const Params& params, const volatile Bases& bases, int row0, Totals& totals)
      : exp2_(lane_id()) {
    static_assert(kRows * kFeatures <= 32, "a lane brings an element");
    const int own = min_of(lane_id(), kRows * kFeatures - 1);
    const Accumulator x = query(params, bases, row0 + own / kFeatures, own % kFeatures) * (params.scale * kLog2E);
    foldable_ = __all_sync(kFullWarp, fabs(x) < pos_inf());
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) q_[r][f] = __shfl_sync(kFullWarp, x, r * kFeatures + f);
      start_[r] = pos_inf();
    }
    if (lane_id() < kRows) totals.row[lane_id()] = {}, totals.start[lane_id()] = pos_inf();
    __syncwarp();  // before other lanes read them
  }

  // Adds the steps at `at`, `at` + stride, ... below `end`, all of whose keys are seen by all rows; or returns false,
  // and the sums are to be restored.
  template <bool kHasBias, bool kHasValue>
  __device__ __forceinline__ bool bet_on_tile(u32 at, u32 end, u32 stride, u32 bias_at, u32 bias_stride) {
#pragma unroll 1
    for (; at < end; at += stride, bias_at += bias_stride) {
      const LaneRows k(at), v(kHasValue ? at + KeyTile::kV : at);
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        Accumulator x[kRows];
        exponents<kHasBias>(x, k, i, bias_at);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const Accumulator p = exp2_.flushed(x[r]);
          sums_.sum[r] += p;
#pragma unroll
          for (int f = 0; f < kFeatures; ++f)
            if constexpr (kHasValue) sums_.o[r][f] = fma(p, v.at(i, f), sums_.o[r][f]);
        }
      }
    }
    bool lost = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) lost |= Bet::sum_loses<kTileLimit>(sums_.sum[r]);
    return !__any_sync(kFullWarp, lost);
  }

  // The same for a single step; or returns false and has changed nothing.
  template <bool kHasBias>
  __device__ __forceinline__ bool bet_on_step(const Params& params, u32 at, u32 bias_at) {
    Accumulator p[kRows][kLaneKeys];
    LaneRows rows(at);
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      Accumulator x[kRows];
      exponents<kHasBias>(x, rows, i, bias_at);
#pragma unroll
      for (int r = 0; r < kRows; ++r) p[r][i] = exp2_.flushed(x[r]);
    }
    bool lost = false;
    Accumulator sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sum[r] = p[r][0];
#pragma unroll
      for (int i = 1; i < kLaneKeys; ++i) sum[r] += p[r][i];
      lost |= Bet::sum_loses<kStepLimit>(sum[r]);
    }
    if (params.value_dim > 0) rows.load(at + KeyTile::kV);  // before the vote: not to be waited for after it
    if (__any_sync(kFullWarp, lost)) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums_.sum[r] += sum[r];
#pragma unroll
      for (int f = 0; f < kFeatures; ++f)
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) sums_.o[r][f] = fma(p[r][i], rows.at(i, f), sums_.o[r][f]);
    }
    return true;
  }

  // Moves references to a step's maxima where that is worth it and safe. Nothing may be summed since the last flush.
  __device__ __forceinline__ void move_references(bool has_bias, u32 at, u32 bias_at, Totals& totals) {
    const LaneRows k(at);
    constexpr int kPadded = power_of_two_from(kRows), kSharers = 32 / kPadded;
    Accumulator max[kPadded];
#pragma unroll
    for (int r = 0; r < kPadded; ++r) max[r] = neg_inf();
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const Accumulator bias = has_bias ? lane_bias(bias_at, i) : 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Accumulator x = bias * kLog2E;
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) x = fma(q_[r][f], k.at(i, f), x);
        max[r] = larger(max[r], x);
      }
    }
    fold<Larger, kPadded>(max);
    const int r = lane_id() / kSharers;
    if (lane_id() % kSharers == 0 && r < kRows && fabs(max[0]) < kLargeExponent / 16) {
      RowSums<kFeatures> row = totals.row[r];
      const Accumulator own = max[0] * kLn2;
      if (Reference::moves(row.max, own, kLog2E)) {
        row.move_to(own, LaneExp2{});
        totals.row[r] = row;
        totals.start[r] = start_of(row.max);
      }
    }
    __syncwarp();  // all rows are stored
    read_starts(totals);
  }

  // A step of keys of which some may not exist or not be seen, the first being `key`; `row0` is the warp's first row.
  __device__ __forceinline__ void careful_step(const Params& params, const volatile Bases& bases, int row0, int key,
                                               u32 at, u32 bias_at, Totals& totals) {
    Accumulator bias[kLaneKeys] = {};
    if (params.key_bias != nullptr) {
      bool absent = true;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) bias[i] = lane_bias(bias_at, i), absent &= bias[i] == neg_inf();
      if (__all_sync(kFullWarp, absent)) return;  // padding: rows that have no key before it would lose every bet
    }
    sums_.flush(totals);
    const Band band{params.band_lo, params.band_hi};
    key += kUnitKeys * lane_id();
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      Accumulator s[kLaneKeys] = {}, max = neg_inf();
      LaneRows rows(at);
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) {
        const Accumulator q = query(params, bases, row0 + r, f);
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) s[i] = fma(q, rows.at(i, f), s[i]);
      }
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        s[i] = apply_terms(params, s[i], bias[i]).value;
        const int own = key + key_offset(i);
        if (own >= params.seqlen_k || !band.keeps(row0 + r, own)) s[i] = neg_inf();
        max = larger(max, s[i]);
      }
      max = warp_max(max);
      RowSums<kFeatures> row = totals.row[r];
      if (Reference::moves(row.max, max, kLog2E)) row.move_to(max, exp2_);
      const Reference reference(row.max, kLog2E);
      Accumulator sums[1 + kFeatures] = {};
      if (params.value_dim > 0) rows.load(at + KeyTile::kV);
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        s[i] = exp2_(reference.is_large() ? (s[i] - reference.m) * kLog2E : fma(s[i], kLog2E, -reference.mc));
        sums[0] += s[i];
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) sums[1 + f] = fma(s[i], rows.at(i, f), sums[1 + f]);
      }
#pragma unroll
      for (int i = 0; i <= kFeatures; ++i) row.sums[i] += warp_sum(sums[i]);
      __syncwarp();  // all lanes have read the row
      if (lane_id() == 0) totals.row[r] = row, totals.start[r] = start_of(row.max);
    }
    __syncwarp();  // all rows are stored
    read_starts(totals);
  }

  __device__ __forceinline__ void flush(Totals& totals) { sums_.flush(totals); }

  // Sums to shared memory and back: vectors from `at` on, every 512 bytes.
  static constexpr int kSavedVectors = ceil_div(int(sizeof(Sums)), 16);
  __device__ __forceinline__ void save(u32 at) const {
    constexpr int kPerVector = 16 / int(sizeof(Accumulator));
#pragma unroll
    for (int i = 0; i < kSavedVectors; ++i) {
      Accumulator x[kPerVector] = {};
#pragma unroll
      for (int j = 0; j < kPerVector; ++j)
        if (i * kPerVector + j < kSums) x[j] = element(sums_, i * kPerVector + j);
      st_shared(at + 512 * i, x);
    }
  }
  __device__ __forceinline__ void restore(u32 at) {
    constexpr int kPerVector = 16 / int(sizeof(Accumulator));
#pragma unroll
    for (int i = 0; i < kSavedVectors; ++i) {
      Accumulator x[kPerVector];
      ld_shared(x, at + 512 * i);
#pragma unroll
      for (int j = 0; j < kPerVector; ++j)
        if (i * kPerVector + j < kSums) element(sums_, i * kPerVector + j) = x[j];
    }
  }

 private:
  // Of 2, for a key of this lane's.
  template <bool kHasBias>
  __device__ __forceinline__ void exponents(Accumulator (&x)[kRows], const LaneRows& k, int i, u32 bias_at) const {
    const Accumulator bias = kHasBias ? lane_bias(bias_at, i) : 0;
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) {
      const Accumulator feature = k.at(i, f);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        x[r] = fma(q_[r][f], feature, f > 0 ? x[r] : kHasBias ? fma(bias, kLog2E, start_[r]) : start_[r]);
    }
  }

  __device__ __forceinline__ void read_starts(const Totals& totals) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) start_[r] = totals.start[r];
    if (!foldable_) start_[0] = quiet_nan();
  }

  static constexpr int kSums = kRows * (1 + kFeatures);
  template <class S>
  static __device__ __forceinline__ auto& element(S& sums, int i) {
    return i < kRows ? sums.sum[i] : sums.o[(i - kRows) / kFeatures][(i - kRows) % kFeatures];
  }

  Exp2 exp2_;
  Accumulator q_[kRows][kFeatures];  // times scale * log2(e)
  bool foldable_;                    // whether q leaves room for that factor
  Accumulator start_[kRows];         // the totals'
  Sums sums_;                        // over this lane's keys since the last flush
};

}  // namespace cuflash
