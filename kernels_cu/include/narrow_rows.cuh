// The rows of one warp where features are few: every lane holds all rows whole and takes keys of its own, so scores are
// plain multiply-adds and nothing is exchanged until sums are moved to the rows' totals in shared memory.
//
// A step of keys goes one of two ways. The fast one bets that no reference has to move: the exponents of 2 come
// straight out of the multiply-adds, which start from minus the reference, with scale * log2(e) already in q; the sums
// of the step tell whether the bet holds, before anything is kept. The careful one is the online softmax of
// softmax.cuh, in natural units, with masks, row by row on the totals; it takes the keys that the fast one may not or
// could not do. Both give p within the rounding of the scores; products that overflow before they are scaled do so in
// the careful one alone.
#pragma once
#include "feature_tile.cuh"
#include "narrow_totals.cuh"
#include "score.cuh"

namespace cuflash {

template <int kRows, int kFeatures>
class NarrowRows {
 public:
  using Totals = WarpTotals<kRows, kFeatures>;

  __device__ __forceinline__ NarrowRows(const Params& params, const volatile Bases& bases, int row0, Totals& totals)
      : exp2_(lane_id()) {
    const Accumulator factor = params.scale * kLog2E;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) q_[r][f] = query(params, bases, row0 + r, f) * factor;
      start_[r] = pos_inf();
    }
    if (lane_id() < kRows) totals.row[lane_id()] = {}, totals.start[lane_id()] = pos_inf();
    __syncwarp();  // before other lanes read them
  }

  // Adds a step's keys, all of which exist and are seen by all rows; or returns false and has changed nothing. `at` is
  // the address of this lane's.
  template <bool kHasBias, class Tile>
  __device__ __forceinline__ bool fast_step(const Params& params, u32 at) {
    Accumulator p[kRows][kLaneKeys], x[kLaneKeys], bias[kLaneKeys], sum[kRows];
    if constexpr (kHasBias) ld_shared(bias, at + Tile::kKeyBias);
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) {
      ld_shared(x, at + Tile::kK + f * Tile::kPitch);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
          if (f == 0) p[r][i] = kHasBias ? fma(bias[i], kLog2E, start_[r]) : start_[r];
          p[r][i] = fma(q_[r][f], x[i], p[r][i]);
        }
    }
    bool lost = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        lost |= Bet::exponent_loses(p[r][i]);
        p[r][i] = exp2_.flushed(p[r][i]);
        sum[r] = i == 0 ? p[r][i] : sum[r] + p[r][i];
      }
      lost |= Bet::sum_loses<kStepLimit>(sum[r]);
    }
    ld_shared(x, at + Tile::kV);  // before the vote: not to be waited for after it
    if (__any_sync(kFullWarp, lost)) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums_.sum[r] += sum[r];
    if (params.value_dim == 0) return true;
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) {
      if (f > 0) ld_shared(x, at + Tile::kV + f * Tile::kPitch);
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i)
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums_.o[r][f] = fma(p[r][i], x[i], sums_.o[r][f]);
    }
    return true;
  }

  // The same for keys of which some may not exist or not be seen, the first being `key`; `row0` is the warp's first
  // row.
  template <class Tile>
  __device__ __forceinline__ void careful_step(const Params& params, const volatile Bases& bases, int row0, int key,
                                               u32 at, Totals& totals) {
    Accumulator x[kLaneKeys], bias[kLaneKeys] = {};
    if (params.key_bias != nullptr) {
      ld_shared(bias, at + Tile::kKeyBias);
      bool absent = true;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) absent &= bias[i] == neg_inf();
      if (__all_sync(kFullWarp, absent)) return;  // padding: rows that have no key before it would lose every bet
    }
    sums_.flush(totals);
    const Band band{params.band_lo, params.band_hi};
    key += kLaneKeys * lane_id();
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      Accumulator s[kLaneKeys] = {}, max = neg_inf();
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) {
        const Accumulator q = query(params, bases, row0 + r, f);
        ld_shared(x, at + Tile::kK + f * Tile::kPitch);
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) s[i] = fma(q, x[i], s[i]);
      }
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        s[i] = apply_terms(params, s[i], bias[i]).value;
        if (key + i >= params.seqlen_k || !band.keeps(row0 + r, key + i)) s[i] = neg_inf();
        max = larger(max, s[i]);
      }
      max = warp_max(max);
      RowSums<kFeatures> row = totals.row[r];
      if (Reference::moves(row.max, max, kLog2E)) row.move_to(max, exp2_);
      const Reference reference(row.max, kLog2E);
      Accumulator sum = 0;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        s[i] = exp2_(reference.is_large() ? (s[i] - reference.m) * kLog2E : fma(s[i], kLog2E, -reference.mc));
        sum += s[i];
      }
      row.sums[0] += warp_sum(sum);
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) {
        if (params.value_dim == 0) break;
        ld_shared(x, at + Tile::kV + f * Tile::kPitch);
        Accumulator o = 0;
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) o = fma(s[i], x[i], o);
        row.sums[1 + f] += warp_sum(o);
      }
      __syncwarp();  // all lanes have read the row
      if (lane_id() == 0) {
        totals.row[r] = row;
        totals.start[r] = start_of(row.max);
      }
    }
    __syncwarp();  // all rows are stored
    bool foldable = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) foldable &= fabs(q_[r][f]) < pos_inf();
      start_[r] = totals.start[r];
    }
    if (!foldable) start_[0] = quiet_nan();  // q leaves no room for the factor
  }

  __device__ __forceinline__ void flush(Totals& totals) { sums_.flush(totals); }

 private:
  Exp2 exp2_;
  Accumulator q_[kRows][kFeatures];  // times scale * log2(e)
  Accumulator start_[kRows];         // the totals'
  LaneSums<kRows, kFeatures> sums_;  // over this lane's keys since the last flush
};

}  // namespace cuflash
