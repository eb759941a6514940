// Online softmax of one warp's rows in float64, base 2, for tiles so narrow that its arithmetic is most of the time.
// After softmax.cuh; what a block costs there beside the exponentials, maxima and their exchange, is left to the blocks
// that need it: each score is held against two limits of its row, within which p needs no move of the reference and no
// care. Limits are compared as floats, by the high words of the doubles: two instructions a score that do not take the
// FP64 pipe.
//
// References of exponents are multiples of 1/256, so that the exponential takes the score as it is (exp2_shared.cuh).
#pragma once
#include "exp2_shared.cuh"
#include "softmax.cuh"

namespace cuflash {

template <int kMTiles>
struct TableSoftmax {
  static constexpr int kRows = 2 * kMTiles;
  Accumulator row_max[kRows];  // m: the maximum when the reference last moved
  Accumulator row_sum[kRows];  // over this lane's columns; where nobody asks for it, not computed
  Accumulator c;               // from a score to an exponent of 2
  SharedExp2Table table;       // the including kernel's to give

  __device__ __forceinline__ explicit TableSoftmax(Accumulator exponent_scale) : c(exponent_scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_max[r] = neg_inf(), row_sum[r] = 0, set_limits(r);
  }

  // Turns scores into p, and rescales o and the sums of rows whose reference moves. Warps that hold other columns of
  // the same rows have references of their own.
  template <int kCols, int kOCols, class Share>
  __device__ __forceinline__ void update(Fragment<kMTiles, kCols>& s, Fragment<kMTiles, kOCols>& o, Share) {
    if (!bet(s)) careful_update(s, o);
  }

  // Turns scores into p where no reference has to move; or returns false and has changed nothing.
  template <int kCols>
  __device__ __forceinline__ bool bet(Fragment<kMTiles, kCols>& s) {
    bool within = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      s.for_each_in_row(r, [&](Accumulator& x) { within &= high_word(x) < above_[r] && high_word(x) > below_[r]; });
    if (__all_sync(kFullWarp, within)) {
      to_p(s, [&](int r, Accumulator x) { return ex2_near(x, c, start_[r], table); });
      return true;
    }
    // Keys that are absent or far below the reference have a p of 0. Comparisons of doubles: -inf is below any limit,
    // and no result of the fast ones is kept for here.
    bool not_above = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int high = __float_as_int(above_[r]);
      const Accumulator above = __hiloint2double(high, high >> 31);  // what has this high word is not below it
      s.for_each_in_row(r, [&](Accumulator& x) { not_above &= x < above; });
    }
    if (!__all_sync(kFullWarp, not_above)) return false;
    to_p(s, [&](int r, Accumulator x) {
      const int high = __float_as_int(below_[r]);
      const Accumulator below = __hiloint2double(high, ~(high >> 31));
      const Accumulator p = ex2_near(x, c, start_[r], table);
      return x > below ? p : 0;
    });
    return true;
  }

  template <int kCols, int kOCols>
  __device__ __forceinline__ void careful_update(Fragment<kMTiles, kCols>& s, Fragment<kMTiles, kOCols>& o) {
    Accumulator max[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      max[r] = row_max[r];
      s.for_each_in_row(r, [&](Accumulator& x) { max[r] = larger(max[r], x); });
      max[r] = quad_max(max[r]);
      if (!Reference::moves(row_max[r], max[r], c)) max[r] = row_max[r];
    }
    move_to(max, o);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Reference reference = this->reference(r);
      s.for_each_in_row(
          r, [&](Accumulator& x) { x = reference.is_large() ? (x - reference.m) * c : fma(x, c, -reference.mc); });
    }
    to_p(s, [&](int, Accumulator x) { return ex2(x, table); });
  }

  // Makes these maxima the references.
  template <int kOCols>
  __device__ __forceinline__ void move_to(const Accumulator (&max)[kRows], Fragment<kMTiles, kOCols>& o) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Accumulator rescale =
          reference_of(max[r]).rescale_from(reference_of(row_max[r]), [&](Accumulator x) { return ex2(x, table); });
      row_max[r] = max[r];
      row_sum[r] *= rescale;
      o.for_each_in_row(r, [&](Accumulator& x) { x *= rescale; });
      set_limits(r);
    }
  }

  __device__ __forceinline__ Reference reference(int r) const { return reference_of(row_max[r]); }

  // The maximum whose Reference, where c is log2(e), is the row's to within an ulp: for RowSums.
  __device__ __forceinline__ Accumulator reference_max(int r) const {
    const Accumulator mc = reference(r).mc;
    return row_max[r] != neg_inf() && fabs(mc) < kNear ? mc * kLn2 : row_max[r];
  }

 private:
  // Below it, sums of exponents and kSharedRound keep all bits of multiples of 1/256.
  static constexpr Accumulator kNear = kSharedRound / 8;

  // Of finite doubles below 2^1017, in the order of the doubles; NaN beyond.
  static __device__ __forceinline__ float high_word(Accumulator x) { return __int_as_float(__double2hiint(x)); }

  __device__ __forceinline__ Reference reference_of(Accumulator max) const {
    Reference reference(max, c);
    if (fabs(reference.mc) < kNear) reference.mc = add_rn(add_rn(reference.mc, kSharedRound), -kSharedRound);
    return reference;
  }

  __device__ __forceinline__ void set_limits(int r) {
    constexpr Accumulator kMost = 1e300;  // where c is tiny
    const Accumulator mc = reference_of(row_max[r]).mc;
    start_[r] = kSharedRound - mc;
    above_[r] = high_word(fmin((mc + Reference::kLag) / c, kMost));
    below_[r] = high_word(fmax((mc - 1020) / c, -kMost));
    if (row_max[r] == neg_inf() || !(fabs(mc) < kNear)) above_[r] = quiet_nan();  // no score is within
  }

  template <int kCols, class Exp>
  __device__ __forceinline__ void to_p(Fragment<kMTiles, kCols>& s, const Exp& exp) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Of the block by itself, as one long chain of additions would drift; in two, as each addition waits for the
      // last.
      Accumulator sum[2] = {};
      int column = 0;
      s.for_each_in_row(r, [&](Accumulator& x) {
        x = exp(r, x);
        sum[column % 2] = column < 2 ? x : sum[column % 2] + x;
        ++column;
      });
      row_sum[r] += sum[0] + sum[1];
    }
  }

  Accumulator start_[kRows];           // kSharedRound - mc
  float above_[kRows], below_[kRows];  // high words of the limits
};

}  // namespace cuflash
