// lse and delta of query rows, for products that take them off: one step more, in which the left operand is -1. Then
// scores come out less lse / scale and dp less delta. Lanes that read both for each column of theirs keep shared memory
// busy for as long as a tenth of all products.
//
// Both are sums of three bfloat16, which hold all bits of a float. But tensor cores cut off what is small beside the
// largest of a sum: of the exponent of p some 2^-22 of its lse. Where that could show, or where a number is not finite,
// a row needs care, and the whole call takes lse and delta off after the products.
#pragma once
#include "params.cuh"
#include "planes.cuh"

namespace cuflash {

struct alignas(16) RowTerms {
  u32 parts[3];  // pairs of bfloat16: of lse / scale, of delta
  u32 none;      // columns that are multiplied by 0
};

// The left operand of lse or, by other columns, of delta: a lane has two columns of RowTerms in two rows. The step is
// 16 columns deep, RowTerms has 8.
struct TermFactors {
  u32 x[4];

  // By shuffles: plain numbers ptxas would form anew behind the fence of each product, and split the product in two.
  __device__ __forceinline__ void form(int lane, bool of_delta) {
    constexpr u32 kMinusOne = 0xbf80;
    const u32 own = lane % 4 < 3 ? kMinusOne << (of_delta ? 16 : 0) : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __shfl_sync(kFullWarp, i < 2 ? own : 0, lane);
  }
};

__device__ __forceinline__ bool needs_care(float lse, float delta) {
  constexpr float kMostExponent = 4096;
  return !(fabsf(lse) * kLog2E < kMostExponent && fabsf(delta) < pos_inf());
}

// `is_live`: the row exists and has keys. Else its lse / scale is such that p is 0 whatever the score.
__device__ __forceinline__ RowTerms row_terms(bool is_live, float lse, float delta, float scale) {
  RowTerms terms{};
  split_pair<BFloat16>(is_live ? lse / scale : 0x1p127f, is_live ? delta : 0, terms.parts);
  return terms;
}

}  // namespace cuflash
