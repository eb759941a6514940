// Online softmax of one warp's rows, base 2.
//
// p = 2^(s*c - mc) (one FMA) with a reference mc = fl(m * c) for each row, used alike in p, in the rescale and in lse:
// any common reference is exact. m is the row's maximum when the reference last moved. It moves only once the maximum
// has grown by a factor of 2^kLag in p (where that is bet on, in the mean of what a lane has of a block), which is rare
// after the first blocks: until then p and the sums are at most so much larger than they could be, and o is left alone.
// From |mc| = 2^24 (double: 2^53) on, the rounding of the product no longer cancels in the FMA (its residue can be
// thousands), so such rows subtract first: p = 2^((s - m) * c), reference m * c unrounded. A mask is -inf; the
// reference of a row that has seen no key is 0.
#pragma once
#include "fragment.cuh"

namespace cuflash {

// Negated so that NaN counts as large.
__device__ __forceinline__ bool is_large(Accumulator exponent) { return !(fabs(exponent) < kLargeExponent); }

// Of one row: the maximum m when the reference last moved, and the reference as p uses it.
struct Reference {
  static constexpr Accumulator kLag = 8;
  Accumulator max, m, mc;  // m: 0 where max is -inf, a row that has seen no key
  Accumulator c;           // from a score to an exponent of 2

  __device__ __forceinline__ Reference(Accumulator max, Accumulator c)
      : max(max), m(max == neg_inf() ? 0 : max), mc(mul_rn(m, c)), c(c) {}

  // Negated: a reference of -inf moves, whatever the maximum.
  static __device__ __forceinline__ bool moves(Accumulator old_max, Accumulator max, Accumulator c) {
    return !((max - old_max) * c <= kLag);
  }

  __device__ __forceinline__ bool is_large() const { return cuflash::is_large(mc); }

  // What the move from an older reference costs in the exponent, each as it was used: rounded below 2^24, exact above.
  __device__ __forceinline__ Accumulator exponent_from(const Reference& old) const {
    return is_large()       ? (old.is_large() ? (old.m - m) * c : fma(-m, c, old.mc))
           : old.is_large() ? fma(old.m, c, -mc)
                            : old.mc - mc;
  }

  // The factor of sums that move from an older reference to this one. Those of a row without keys so far are 0: any
  // finite factor serves, and 2^exponent may not be finite.
  template <class Exp>
  __device__ __forceinline__ Accumulator rescale_from(const Reference& old, const Exp& exp2) const {
    const Accumulator factor = exp2(exponent_from(old));  // by whole warps
    return max == old.max ? 1 : old.max == neg_inf() ? 0 : factor;
  }

  // The factor that makes o of the row an average, and the row's lse in natural units; `sum` is over the whole row.
  __device__ __forceinline__ void finish(Accumulator sum, Accumulator lse_scale, Accumulator& o_scale,
                                         Accumulator& lse) const {
    const bool empty = max == neg_inf() && sum == 0;  // NaN scores leave a NaN sum, not an empty row
    o_scale = empty ? 0 : 1 / sum;
    if (empty || max == pos_inf()) {
      lse = max;
    } else {
      lse = is_large() ? add_rn(mul_rn(m, lse_scale), lg2(sum) * kLn2) : (mc + lg2(sum)) * kLn2;
    }
  }
};

template <int kMTiles>
struct OnlineSoftmax {
  static constexpr int kRows = 2 * kMTiles;
  Accumulator row_max[kRows];  // m; the warps that share the row agree
  Accumulator row_sum[kRows];  // over this lane's columns
  Accumulator c;               // from a score to an exponent of 2
  Exp2 exp2;

  __device__ __forceinline__ explicit OnlineSoftmax(Accumulator exponent_scale) : c(exponent_scale), exp2(lane_id()) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_max[r] = neg_inf(), row_sum[r] = 0;
  }

  __device__ __forceinline__ Reference reference(int r) const { return Reference(row_max[r], c); }

  // Turns scores into p, and rescales o and the sums of rows whose reference moves. share(maxima) is where warps that
  // hold other columns of the same rows agree.
  template <int kCols, int kOCols, class Share>
  __device__ __forceinline__ void update(Fragment<kMTiles, kCols>& s, Fragment<kMTiles, kOCols>& o, Share share) {
    update(s, share, [&](const Accumulator(&rescale)[kRows]) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) o.for_each_in_row(r, [&](Accumulator& x) { x *= rescale[r]; });
    });
  }
  // The same, where o is not to be touched yet: whether it has to be rescaled, and by what.
  template <int kCols>
  __device__ __forceinline__ bool update(Fragment<kMTiles, kCols>& s, Accumulator (&rescale)[kRows]) {
    bool moved = false;
    update(
        s, [](Accumulator(&)[kRows]) {},
        [&](const Accumulator(&by)[kRows]) {
          moved = true;
#pragma unroll
          for (int r = 0; r < kRows; ++r) rescale[r] = by[r];
        });
    return moved;
  }

  // A bet that no reference has to move, without a maximum: p of all scores, two neighbours at a time to
  // pack(number, low, high), and whether it is won for the whole warp. If not, p is worth nothing, nothing else has
  // changed, and update() is next: it moves the reference of each row that lost, so that the next bet is good. What a
  // lane sums of a row is not small where one p is not, a score or the reference is NaN, or the row has seen no key.
  // exponent(score, -mc, number of the lane's column) need not be the FMA of update(); has_lost(): whether it was not
  // right for all of the lane's scores. finish(is_good) waits for whoever still reads what pack() writes: kEarly pairs
  // are formed before, and by their sums the lane has not lost yet.
  template <int kEarly, int kCols, class Exponent, class Lost, class Finish, class Pack>
  __device__ __forceinline__ bool bet(const Fragment<1, kCols>& s, Exponent exponent, Lost has_lost, Finish finish,
                                      Pack pack) {
    static_assert(kMTiles == 1 && !Exp2::kHasFar);
    constexpr Accumulator kMost = Accumulator(1 << int(Reference::kLag)) * (kCols / 4);
    static_assert(kMost < 65504, "float16 holds every p");
    Accumulator mc[2] = {mul_rn(row_max[0], c), mul_rn(row_max[1], c)};
    // Or update()'s exponents would be these, kept in as many registers as s has. Few features leave them.
    if constexpr (kTile.value_dim > 64) asm("" : "+f"(mc[0]), "+f"(mc[1]));
    constexpr int kPairs = kCols / 4;
    Accumulator early[max_of(kEarly, 1)][2], sum[2] = {0, 0};
    const auto form = [&](Accumulator(&p)[2], int i) {
      const int tile = i / 2, row = i % 2;
#pragma unroll
      for (int j = 0; j < 2; ++j)
        sum[row] += p[j] = exp2.near(exponent(s.x[0][tile][2 * row + j], -mc[row], 2 * tile + j));
    };
#pragma unroll
    for (int i = 0; i < kEarly; ++i) form(early[i], i);
    finish(sum[0] <= kMost && sum[1] <= kMost);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      Accumulator late[2];
      Accumulator(&p)[2] = i < kEarly ? early[i < kEarly ? i : 0] : late;
      if (i >= kEarly) form(p, i);
      pack(i, p[0], p[1]);
    }
    bool lost = has_lost();
#pragma unroll
    for (int r = 0; r < 2; ++r) lost |= is_large(mc[r]) || !(sum[r] <= kMost);
    if (__any_sync(kFullWarp, lost)) return false;
    row_sum[0] += sum[0];
    row_sum[1] += sum[1];
    return true;
  }

  template <int kCols, class Share, class Rescale>
  __device__ __forceinline__ void update(Fragment<kMTiles, kCols>& s, Share share, Rescale rescale_o) {
    Accumulator max[kRows], mc[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      max[r] = row_max[r];
      s.for_each_in_row(r, [&](Accumulator& x) { max[r] = larger(max[r], x); });
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) max[r] = quad_max(max[r]);
    share(max);
    bool rare = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      mc[r] = mul_rn(row_max[r], c);
      rare |= is_large(mc[r]) || Reference::moves(row_max[r], max[r], c);
    }
    if (__any_sync(kFullWarp, rare)) move_references(s, max, mc, rescale_o);
    bool far = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      s.for_each_in_row(r, [&](Accumulator& x) {
        x = fma(x, c, -mc[r]);
        far |= Exp2::is_far(x);
      });
    if (Exp2::kHasFar && __any_sync(kFullWarp, far)) {
      to_p(s, exp2);
    } else {
      to_p(s, [&](Accumulator x) { return exp2.near(x); });
    }
  }

 private:
  template <int kCols, class Exp>
  __device__ __forceinline__ void to_p(Fragment<kMTiles, kCols>& s, const Exp& exp) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Accumulator sum = 0;  // of the block by itself: one long chain of additions would drift
      s.for_each_in_row(r, [&](Accumulator& x) { sum += x = exp(x); });
      row_sum[r] += sum;
    }
  }

  // The rare part of update(): references move, and large ones leave the scores before the FMA does.
  template <int kCols, class Rescale>
  __device__ __forceinline__ void move_references(Fragment<kMTiles, kCols>& s, const Accumulator (&max)[kRows],
                                                  Accumulator (&mc)[kRows], Rescale rescale_o) {
    Accumulator rescale[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Reference old(row_max[r], c);
      const bool moved = Reference::moves(old.max, max[r], c);
      if (moved) row_max[r] = max[r];
      const Reference now(row_max[r], c);
      mc[r] = now.mc;
      if (now.is_large()) {
        s.for_each_in_row(r, [&](Accumulator& x) { x -= now.m; });
        mc[r] = 0;
      }
      rescale[r] = now.rescale_from(old, exp2);
      row_sum[r] *= rescale[r];
    }
    rescale_o(rescale);
  }
};

}  // namespace cuflash
