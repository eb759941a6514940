// The rows of one warp where features are few and rows many: every lane owns whole rows, 32 apart, and all lanes take
// the same key at a time, whose vectors shared memory hands to all of them at once. Nothing is exchanged between lanes;
// votes decide which way all of them go.
//
// Bets that no reference has to move are on a warp's part of a key tile, a chunk: exponents of 2 come straight out of
// the multiply-adds, and no key looks at anything. Sums of a chunk start from 0 and go to the totals in shared memory
// once the bet is won: a lost one has nothing to restore, and chains of additions are as long as a chunk. Before the
// first bet of a row, and after a lost one, references move to the maxima of keys, which takes no exponentials. Masks
// are a comparison and a choice. The careful way, row by row on the totals, is for what is left: NaN, scores without a
// fraction, q without room for the factor.
#pragma once
#include "bases.cuh"
#include "key_tile_sm90.cuh"
#include "narrow_totals.cuh"
#include "score.cuh"

namespace cuflash {

static_assert(sizeof(Operand) == sizeof(Accumulator), "keys are read as they are in memory");
constexpr int kPerVector = 16 / int(sizeof(Accumulator));
// The keys of a group fill kFeatures whole vectors.
constexpr int kGroupKeys = kPerVector, kGroupBytes = kGroupKeys * kKeyBytes;
constexpr int kGroupBias = kGroupKeys * int(sizeof(Accumulator));
constexpr int kChunkLimit = 16;  // of the sum over a chunk, as an exponent of 2

// Keys of one tile in shared memory.
struct KeyRange {
  u32 at, bias_at;  // of the first key's row of K, and of its bias
  int count;        // whole groups

  __device__ __forceinline__ KeyRange first(int keys) const { return {at, bias_at, min_of(count, keys)}; }
};

// K or V of a group. A vector is loaded when the first key of which it has a part is next.
struct GroupRows {
  Accumulator x[kFeatures][kPerVector];

  static constexpr int vectors_before(int key) { return (key * kFeatures + kPerVector - 1) / kPerVector; }
  __device__ __forceinline__ void load(int key, u32 at) {
#pragma unroll
    for (int i = 0; i < kFeatures; ++i)
      if (i >= vectors_before(key) && i < vectors_before(key + 1)) ld_shared(x[i], at + 16 * i);
  }
  __device__ __forceinline__ Accumulator at(int key, int feature) const {
    const int i = key * kFeatures + feature;
    return x[i / kPerVector][i % kPerVector];
  }
};

// What has been summed of a warp's rows, in shared memory: of each lane a few vectors, in which the sums of all its
// rows come first, then their references.
template <int kRows>
struct LaneTotals {
  static constexpr int kColumns = 1 + kFeatures, kSums = kRows * kColumns;
  static constexpr int kSumVectors = ceil_div(kSums, kPerVector), kVectors = ceil_div(kSums + kRows, kPerVector);
  alignas(16) Accumulator x[kVectors][32][kPerVector];

  __device__ __forceinline__ const Accumulator& word(int lane, int i) const {
    return x[i / kPerVector][lane][i % kPerVector];
  }
  // Of row r of the warp.
  __device__ __forceinline__ RowSums<1> column(int r, int c) const {
    const int lane = r % 32, sum = r / 32 * kColumns;
    return {word(lane, kSums + r / 32), {word(lane, sum), word(lane, sum + 1 + c)}};
  }
};

// The same for one lane, by address: r numbers its own rows.
template <int kRows>
struct OwnTotals {
  using All = LaneTotals<kRows>;
  u32 base;

  static __device__ __forceinline__ u32 offset(int word) {
    return word / kPerVector * 512 + word % kPerVector * int(sizeof(Accumulator));
  }
  __device__ __forceinline__ Accumulator max(int r) const {
    Accumulator x;
    ld_shared(x, base + offset(All::kSums + r));
    return x;
  }
  __device__ __forceinline__ RowSums<kFeatures> load(int r) const {
    RowSums<kFeatures> row;
    row.max = max(r);
#pragma unroll
    for (int i = 0; i < All::kColumns; ++i) ld_shared(row.sums[i], base + offset(r * All::kColumns + i));
    return row;
  }
  __device__ __forceinline__ void store(int r, const RowSums<kFeatures>& row) const {
    st_shared(base + offset(All::kSums + r), row.max);
#pragma unroll
    for (int i = 0; i < All::kColumns; ++i) st_shared(base + offset(r * All::kColumns + i), row.sums[i]);
  }
  __device__ __forceinline__ void add(const Accumulator (&sums)[kRows][All::kColumns]) const {
#pragma unroll
    for (int i = 0; i < All::kSumVectors; ++i) {
      Accumulator x[kPerVector];
      ld_shared(x, base + 512 * i);
#pragma unroll
      for (int j = 0; j < kPerVector; ++j) {
        const int word = i * kPerVector + j;
        if (word < All::kSums) x[j] += sums[word / All::kColumns][word % All::kColumns];
      }
      st_shared(base + 512 * i, x);
    }
  }
};

template <int kRows>
class NarrowLanes {
 public:
  using Totals = OwnTotals<kRows>;

  // `row` is the lane's first. All loads are on their way together: nothing branches on what exists.
  __device__ __forceinline__ NarrowLanes(const Params& params, const volatile Bases& bases, int row, Totals totals)
      : exp2_(lane_id()) {
    const Accumulator factor = params.scale * kLog2E;
    const Operand* q_gmem = bases.q;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const i64 at = min_of(row + 32 * r, params.seqlen_q - 1) * params.q_stride.row;
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) q_[r][f] = q_gmem[at + f * params.q_stride.col];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Rows beyond the last are not stored; of scores of 0 they never lose a bet.
      const bool exists = row + 32 * r < params.seqlen_q;
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) q_[r][f] = exists ? q_[r][f] * factor : 0;
      RowSums<kFeatures> none;
      if (!exists) none.max = 0;
      totals.store(r, none);
      start_[r] = start_of(none.max);
    }
  }

  // Whether some row has no reference yet.
  __device__ __forceinline__ bool is_fresh() const {
    bool fresh = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) fresh |= start_[r] == pos_inf();
    return __any_sync(kFullWarp, fresh);
  }

  // Adds keys to the totals, or returns false and has changed nothing. `offset`: by how much the first key lies beyond
  // the first that the lane's first row sees, where rows do not see them all.
  template <bool kHasBias, bool kMasked, bool kHasValue>
  __device__ __forceinline__ bool bet(const Params& params, const KeyRange& keys, u32 offset, Totals totals) const {
    Accumulator sums[kRows][1 + kFeatures] = {};  // as RowSums
    bool lost = false;
    u32 bias_at = keys.bias_at;
    const u32 width = params.band_hi - params.band_lo;
#pragma unroll 1
    for (u32 at = keys.at, end = at + keys.count * kKeyBytes; at != end; at += kGroupBytes) {
      GroupRows k, v;
#pragma unroll
      for (int i = 0; i < kGroupKeys; ++i) {
        Accumulator x[kRows];
        k.load(i, at);
        if constexpr (kHasValue) v.load(i, at + KeyTile::kV);
        exponents<kHasBias>(x, k, i, bias_at, [&](int r) { return start_[r]; });
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (kMasked && offset + i - 32 * r > width) x[r] = neg_inf();
          lost |= Bet::exponent_loses(x[r]);
          const Accumulator p = exp2_.flushed(x[r]);
          sums[r][0] += p;
#pragma unroll
          for (int f = 0; f < kFeatures; ++f)
            if constexpr (kHasValue) sums[r][1 + f] = fma(p, v.at(i, f), sums[r][1 + f]);
        }
      }
      if constexpr (kHasBias) bias_at += kGroupBias;
      if constexpr (kMasked) offset += kGroupKeys;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) lost |= Bet::sum_loses<kChunkLimit>(sums[r][0]);
    if (__any_sync(kFullWarp, lost)) return false;
    totals.add(sums);
    return true;
  }

  // Moves references to the maxima of keys where that is worth it and safe. Returns whether a bet may be made then.
  __device__ __forceinline__ bool move_references(const Params& params, const KeyRange& keys, u32 offset,
                                                  Totals totals) {
    Accumulator max[kRows];
    u32 bias_at = keys.bias_at;
    const u32 width = params.band_hi - params.band_lo;
#pragma unroll
    for (int r = 0; r < kRows; ++r) max[r] = neg_inf();
#pragma unroll 1
    for (u32 at = keys.at, end = at + keys.count * kKeyBytes; at != end; at += kGroupBytes) {
      GroupRows k;
#pragma unroll
      for (int i = 0; i < kGroupKeys; ++i) {
        Accumulator x[kRows];
        k.load(i, at);
        exponents<true>(x, k, i, bias_at, [](int) { return Accumulator(0); });
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          if (offset + i - 32 * r <= width) max[r] = larger(max[r], x[r]);
      }
      bias_at += kGroupBias, offset += kGroupKeys;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Accumulator natural = max[r] * kLn2;
      if (fabs(max[r]) < kLargeExponent / 16 && Reference::moves(totals.max(r), natural, kLog2E)) {
        RowSums<kFeatures> row = totals.load(r);
        row.move_to(natural, LaneExp2{});
        totals.store(r, row);
      }
    }
    return read_starts(totals);
  }

  // Keys of any kind, the first being `key`; `row` is the lane's first. For lse alone K stands where V would, and what
  // is made of it is not stored.
  __device__ __forceinline__ void careful(const Params& params, const volatile Bases& bases, int row, int key,
                                          const KeyRange& keys, Totals totals) {
    const Band band{params.band_lo, params.band_hi};
    const u32 to_v = params.value_dim > 0 ? KeyTile::kV : 0;
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      Accumulator q[kFeatures];
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) q[f] = query(params, bases, row + 32 * r, f);
      RowSums<kFeatures> sums = totals.load(r);
#pragma unroll 1
      for (int i = 0; i < keys.count; ++i) {
        const u32 at = keys.at + i * kKeyBytes;
        Accumulator bias, x, s = 0;
        ld_shared(bias, keys.bias_at + i * int(sizeof(Accumulator)));
        if (bias == neg_inf()) continue;  // the same in all lanes
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
          ld_shared(x, at + f * int(sizeof(Accumulator)));
          s = fma(q[f], x, s);
        }
        s = apply_terms(params, s, bias).value;
        if (!band.keeps(row + 32 * r, key + i)) s = neg_inf();
        const Accumulator max = larger(Accumulator(neg_inf()), s);  // not NaN
        const bool moves = Reference::moves(sums.max, max, kLog2E);
        if (__any_sync(kFullWarp, moves)) sums.move_to(moves ? max : sums.max, exp2_);
        const Reference reference(sums.max, kLog2E);
        const Accumulator p = exp2_(reference.is_large() ? (s - reference.m) * kLog2E : fma(s, kLog2E, -reference.mc));
        sums.sums[0] += p;
#pragma unroll
        for (int f = 0; f < kFeatures; ++f) {
          ld_shared(x, at + to_v + f * int(sizeof(Accumulator)));
          sums.sums[1 + f] = fma(p, x, sums.sums[1 + f]);
        }
      }
      totals.store(r, sums);
    }
    read_starts(totals);
  }

 private:
  // Of 2, for key i of a group.
  template <bool kHasBias, class Start>
  __device__ __forceinline__ void exponents(Accumulator (&x)[kRows], const GroupRows& k, int i, u32 bias_at,
                                            Start start) const {
    Accumulator bias = 0;
    if constexpr (kHasBias) ld_shared(bias, bias_at + i * int(sizeof(Accumulator)));
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) {
      const Accumulator feature = k.at(i, f);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        x[r] = fma(q_[r][f], feature, f > 0 ? x[r] : kHasBias ? fma(bias, kLog2E, start(r)) : start(r));
    }
  }

  // Whether a bet may be made on all rows: that of a row without a key so far is lost by the first key that it sees.
  __device__ __forceinline__ bool read_starts(Totals totals) {
    bool hopeless = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) hopeless |= !(fabs(q_[r][f]) < pos_inf());  // no room for the factor
      start_[r] = start_of(totals.max(r));
      hopeless |= !(start_[r] <= pos_inf());
    }
    return !__any_sync(kFullWarp, hopeless);
  }

  Exp2 exp2_;
  Accumulator q_[kRows][kFeatures];  // times scale * log2(e)
  Accumulator start_[kRows];         // as in WarpTotals
};

}  // namespace cuflash
