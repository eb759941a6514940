// What the warps of the forward for few features keep of their rows in shared memory, and when a lane may take for
// granted that references stay where they are.
#pragma once
#include "row_sums.cuh"

namespace cuflash {

// Whether a bet that no reference has to move may be lost: p and its sums have to stay far below what overflows, and a
// NaN is for the careful step to explain. kLimit: the exponent of 2 that sums may reach.
struct BetFloat {
  static __device__ __forceinline__ bool exponent_loses(float) { return false; }  // 2^x shows it
  template <int kLimit>
  static __device__ __forceinline__ bool sum_loses(float sum) {
    return !(sum <= float(1 << kLimit));
  }
};
struct BetDouble {  // on high words: a comparison of doubles would take the pipe that exp2 and the products share
  static __device__ __forceinline__ bool exponent_loses(double x) { return __double2hiint(x) > 0x40300000; }  // 16
  template <int kLimit>
  static __device__ __forceinline__ bool sum_loses(double sum) {
    return u32(__double2hiint(sum)) > u32(1023 + kLimit) << 20;
  }
};
using Bet = ConditionalType<sizeof(Accumulator) == 8, BetDouble, BetFloat>;
constexpr int kStepLimit = 10;  // of the sum over a step

// A warp's rows: what has been summed of each, and minus its reference as an exponent of 2. That is NaN where no bet
// may be made on it, and loses any bet as +inf where the row has no key so far.
template <int kRows, int kColumns>
struct WarpTotals {
  RowSums<kColumns> row[kRows];
  Accumulator start[kRows];

  __device__ __forceinline__ RowSums<1> column(int r, int c) const {
    return {row[r].max, {row[r].sums[0], row[r].sums[1 + c]}};
  }
};

// What WarpTotals has as a row's start.
__device__ __forceinline__ Accumulator start_of(Accumulator max) {
  const Reference reference(max, kLog2E);
  // From 2^20 (double: 2^49) on, starting from the reference would cost the exponent its fraction.
  const bool near = fabs(reference.mc) < kLargeExponent / 16;
  return max == neg_inf() ? pos_inf() : near ? -reference.mc : quiet_nan();
}

struct Add {
  __device__ __forceinline__ Accumulator operator()(Accumulator a, Accumulator b) const { return a + b; }
};
struct Larger {
  __device__ __forceinline__ Accumulator operator()(Accumulator a, Accumulator b) const { return larger(a, b); }
};

// Sums, or maxima, over all lanes: each exchange halves how many of kCount a lane holds, of twice as many keys. Lane i
// is left with those from number i * kCount / 32 on.
template <class Op, int kCount, int kLanes = 16, int kSize>
__device__ __forceinline__ void fold(Accumulator (&x)[kSize]) {
  constexpr int kHalf = kCount / 2;
  if constexpr (kHalf == 0) {
    x[0] = Op{}(x[0], __shfl_xor_sync(kFullWarp, x[0], kLanes));
  } else {
    const bool upper = lane_id() & kLanes;
#pragma unroll
    for (int i = 0; i < kHalf; ++i)
      x[i] = Op{}(upper ? x[i + kHalf] : x[i], __shfl_xor_sync(kFullWarp, upper ? x[i] : x[i + kHalf], kLanes));
  }
  if constexpr (kLanes > 1) fold<Op, max_of(1, kHalf), kLanes / 2>(x);
}

// What a lane has summed of kRows rows since the last flush: of p, and of p v by column.
template <int kRows, int kColumns>
struct LaneSums {
  Accumulator sum[kRows] = {};
  Accumulator o[kRows][max_of(1, kColumns)] = {};

  // To the totals, over all lanes: chains of additions stay short.
  __device__ __forceinline__ void flush(WarpTotals<kRows, kColumns>& totals) {
    constexpr int kRowSums = 1 + kColumns, kCount = kRows * kRowSums, kPadded = power_of_two_from(kCount);
    constexpr int kOwn = max_of(1, kPadded / 32), kSharers = max_of(1, 32 / kPadded);  // sums of a lane, lanes of a sum
    Accumulator x[kPadded] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r * kRowSums] = sum[r];
      sum[r] = 0;
#pragma unroll
      for (int f = 0; f < kColumns; ++f) x[r * kRowSums + 1 + f] = o[r][f], o[r][f] = 0;
    }
    fold<Add, kPadded>(x);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int own = lane_id() / kSharers * kOwn + i;
      if (own < kCount && lane_id() % kSharers == 0) totals.row[own / kRowSums].sums[own % kRowSums] += x[i];
    }
    __syncwarp();  // before other lanes read them
  }
};

}  // namespace cuflash
