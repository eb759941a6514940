// The 16 rows of one warp where features are few, in float64 on tensor cores: scores are products of depth 4, o a tile
// of 8 columns, of which the one after the features is the sum of p: its V is 1.
//
// A step of keys goes one of two ways, as in narrow_rows.cuh. The fast one bets that no reference has to move, with the
// scale already in q and key_bias where the products begin. The careful one forms the scores as the backward does, with
// masks, and moves references; it takes what the fast one may not or could not do.
#pragma once
#include "key_tile_sm90.cuh"
#include "ptx/mma.cuh"
#include "row_sums.cuh"
#include "score.cuh"
#include "softmax_table.cuh"

namespace cuflash {

constexpr int kStepKeys = 32, kStepBytes = kStepKeys * kKeyBytes, kStepBias = kStepKeys * int(sizeof(Accumulator));
static_assert(kFeatures <= 4, "scores are one step deep");

// What stands in K for the features up to 4, and in V for the column of ones.
struct StepConstants {
  Accumulator zeros[kStepKeys * kFeatures], ones[kStepKeys * kFeatures];

  // By all threads; a barrier follows.
  __device__ __forceinline__ void fill() {
    for (int i = threadIdx.x; i < kStepKeys * kFeatures; i += 32 * kTile.warps) zeros[i] = 0, ones[i] = 1;
  }
};

struct MmaTotals {
  RowSums<kFeatures> row[16];

  __device__ __forceinline__ RowSums<1> column(int r, int c) const {
    return {row[r].max, {row[r].sums[0], row[r].sums[1 + c]}};
  }
};

class MmaRows {
 public:
  __device__ __forceinline__ MmaRows(const Params& params, const volatile Bases& bases, int row0,
                                     const Exp2Roots& roots, const StepConstants& constants, MmaTotals& totals)
      : softmax_(kLog2E), constants_(shared_address(&constants)) {
    softmax_.table = SharedExp2Table(roots);
    o_.clear();
    load_q(q_, params, bases, row0);
#pragma unroll
    for (int h = 0; h < 2; ++h) q_[h] *= params.scale;
    if (lane_id() < 16) totals.row[lane_id()] = {};
    __syncwarp();  // before other lanes read them
  }

  // Adds the step at `at`, all of whose keys are seen by all rows; or returns false and has changed nothing.
  template <bool kHasBias>
  __device__ __forceinline__ bool bet_on_step(const Params& params, u32 at, u32 bias_at) {
    Scores s;
    if constexpr (kHasBias) {
      for_each_bias(bias_at, [&](int n, const Accumulator(&bias)[2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s.x[0][n][i] = bias[i % 2];
      });
    } else {
      s.clear();
    }
    add_products(s, q_, at);
    if (!softmax_.bet(s)) return false;
    accumulate_o(params, s, at);
    return true;
  }

  // A step of keys of which some may not exist or not be seen, the first being `key`; `row0` is the warp's first row.
  __device__ __forceinline__ void careful_step(const Params& params, const volatile Bases& bases, int row0, int key,
                                               u32 at, u32 bias_at) {
    const bool has_bias = params.key_bias != nullptr;
    if (has_bias) {
      Accumulator own;
      ld_shared(own, bias_at + lane_id() * int(sizeof(Accumulator)));
      if (__all_sync(kFullWarp, own == neg_inf())) return;  // padding
    }
    Accumulator q[2];
    load_q(q, params, bases, row0);
    Scores s;
    s.clear();
    add_products(s, q, at);
    s.for_each([&](Accumulator& x, int, int, int) { x = apply_terms(params, x, 0).value; });
    if (has_bias)
      for_each_bias(bias_at, [&](int n, const Accumulator(&bias)[2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s.x[0][n][i] = KeyBias::add(s.x[0][n][i], bias[i % 2]);
      });
    const Band band{params.band_lo, params.band_hi};
    s.for_each([&](Accumulator& x, int, int row, int col) {
      if (key + col >= params.seqlen_k || !band.keeps(row0 + row, key + col)) x = neg_inf();
    });
    if (!softmax_.bet(s)) softmax_.careful_update(s, o_);
    accumulate_o(params, s, at);
  }

  // To the totals: chains of additions stay short.
  __device__ __forceinline__ void flush(MmaTotals& totals) {
    const int t = lane_id() % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      RowSums<kFeatures>& row = totals.row[lane_id() / 4 + 8 * h];
      const Accumulator max = softmax_.reference_max(h);
      const Accumulator rescale = Reference(max, kLog2E).rescale_from(Reference(row.max, kLog2E), [&](Accumulator x) {
        return ex2(x, softmax_.table);
      });
      __syncwarp();  // all lanes have read the reference
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 2 * t + i;
        Accumulator& o = o_.x[0][0][2 * h + i];
        if (column <= kFeatures) {
          Accumulator& sum = row.sums[column == kFeatures ? 0 : 1 + column];
          sum = sum * rescale + o;
        }
        o = 0;
      }
      if (t == 0) row.max = max;
    }
    __syncwarp();  // before other lanes read them
  }

 private:
  using Scores = Fragment<1, kStepKeys>;

  static __device__ __forceinline__ void load_q(Accumulator (&q)[2], const Params& params, const volatile Bases& bases,
                                                int row0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) q[h] = query(params, bases, row0 + lane_id() / 4 + 8 * h, lane_id() % 4);
  }

  // f(tile of 8 keys, biases of this lane's two).
  template <class F>
  static __device__ __forceinline__ void for_each_bias(u32 bias_at, F f) {
#pragma unroll
    for (int n = 0; n < kStepKeys / 8; ++n) {
      Accumulator bias[2];
      ld_shared(bias, bias_at + (8 * n + 2 * (lane_id() % 4)) * int(sizeof(Accumulator)));
      f(n, bias);
    }
  }

  __device__ __forceinline__ void add_products(Scores& s, const Accumulator (&q)[2], u32 at) const {
    const int g = lane_id() / 4, t = lane_id() % 4;
    const u32 k_at = t < kFeatures ? at + g * kKeyBytes + t * int(sizeof(Accumulator)) : constants_;
#pragma unroll
    for (int n = 0; n < kStepKeys / 8; ++n) {
      Accumulator k;
      ld_shared(k, k_at + 8 * n * kKeyBytes);
      dmma_m16n8k4(s.x[0][n], q, k);
    }
  }

  // For lse alone K stands where V would, and what is made of it is not stored.
  __device__ __forceinline__ void accumulate_o(const Params& params, const Scores& p, u32 at) {
    const int g = lane_id() / 4, t = lane_id() % 4;
    const u32 values = at + (params.value_dim > 0 ? KeyTile::kV : 0);
    const u32 v_at = g == kFeatures ? constants_ + int(sizeof(StepConstants::zeros))
                                    : values + 2 * t * kKeyBytes + min_of(g, kFeatures - 1) * int(sizeof(Accumulator));
#pragma unroll
    for (int k = 0; k < kStepKeys / 16; ++k) {
      Accumulator a[8], v[4];
      // Slots 0 and 1 of the depth are columns 2t and 2t + 1 of p's first tile of 8, 2 and 3 those of the next.
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i] = p.x[0][2 * k + i / 4][2 * (i % 2) + i / 2 % 2];
#pragma unroll
      for (int i = 0; i < 4; ++i) ld_shared(v[i], v_at + (16 * k + 8 * (i / 2) + i % 2) * kKeyBytes);
      dmma_m16n8k16(o_.x[0][0], a, v);
    }
  }

  Fragment<1, 8> o_;  // since the last flush
  TableSoftmax<1> softmax_;
  Accumulator q_[2];  // times scale
  u32 constants_;     // where StepConstants are
};

}  // namespace cuflash
