// Before the backward: what its kernels need of each query row.
//   row_lse = lse as the kernels keep it, but +inf for a row without keys and for the padding rows: its p is 0
//   delta = rowsum(do * o) - dlse
#pragma once
#include "locate.cuh"
#include "ptx/convert.cuh"

namespace cuflash {

constexpr int kLanesPerRow = 8, kThreads = 32 * kTile.warps;

// sums[r] = the dot product of rows r of a and b, where `more` says how far they are from a and b.
template <int kRows, class More>
__device__ __forceinline__ void dots(Accumulator (&sums)[kRows], const Params& params, const Operand* a,
                                     const Operand* b, int lane, More more) {
  constexpr int kChunk = 16 / int(sizeof(Operand));
  struct alignas(16) Chunk {
    Operand x[kChunk];
  };
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = 0;
  for (int col0 = kChunk * lane; col0 < params.value_dim; col0 += kChunk * kLanesPerRow) {
    if (kLoad == LoadKind::k16 && col0 + kChunk <= params.value_dim) {
      Chunk ca[kRows], cb[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        ca[r] = *reinterpret_cast<const Chunk*>(a + more(params.dout_stride, r) + col0);
        cb[r] = *reinterpret_cast<const Chunk*>(b + more(params.o_stride, r) + col0);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sums[r] += to_float(ca[r].x[i]) * to_float(cb[r].x[i]);
    } else {
      for (int i = col0; i < min_of(col0 + kChunk, params.value_dim); ++i)
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          sums[r] += to_float(a[more(params.dout_stride, r) + i * params.dout_stride.col]) *
                     to_float(b[more(params.o_stride, r) + i * params.o_stride.col]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int step = 1; step < kLanesPerRow; step *= 2) sums[r] += __shfl_xor_sync(kFullWarp, sums[r], step);
}

// What is known of a row in the end, by one lane.
struct RowOfDelta {
  BatchIndex batch;
  int row;       // -1: the lane has none
  bool is_live;  // the row exists and has keys
  Accumulator lse, delta;
};

// Lanes have so many rows at a time: memory is far.
template <int kRowsPerLane>
__device__ __forceinline__ RowOfDelta attention_delta(const Params& params) {
  constexpr int kApart = kThreads / kLanesPerRow, kRows = kApart * kRowsPerLane;
  static_assert(kRowPadding % kRows == 0, "padding rows are whole CTAs");
  static_assert(kRowsPerLane <= kLanesPerRow, "each lane finishes a row at most");
  const int blocks = ceil_div(params.seqlen_q, kRowPadding) * (kRowPadding / kRows);
  const int lane = threadIdx.x % kLanesPerRow, row0 = work_index() % blocks * kRows + threadIdx.x / kLanesPerRow;
  const BatchIndex batch = batch_index(params, work_index() / blocks, 0);
  const int row = row0 + lane * kApart;  // of this lane in the end
  const bool finishes = lane < kRowsPerLane, exists = finishes && row < params.seqlen_q;
  Accumulator lse = 0, dlse = 0;
  if (exists) {
    lse = params.lse[offset(params.lse_stride, batch) + row * params.lse_stride.row];
    if (params.dlse != nullptr) dlse = params.dlse[offset(params.dlse_stride, batch) + row * params.dlse_stride.row];
  }
  Accumulator sums[kRowsPerLane] = {};
  if (params.dout != nullptr && params.value_dim > 0) {
    // All lanes of a warp take part in the sums: rows that do not exist are others again.
    const auto more = [&](const Strides& stride, int r) {
      return min_of(row0 + r * kApart, params.seqlen_q - 1) * stride.row;
    };
    dots(sums, params, static_cast<const Operand*>(params.dout) + offset(params.dout_stride, batch),
         static_cast<const Operand*>(params.o) + offset(params.o_stride, batch), lane, more);
  }
  Accumulator delta = sums[0];
#pragma unroll
  for (int r = 1; r < kRowsPerLane; ++r) delta = lane == r ? sums[r] : delta;
  return {batch, finishes ? row : -1, exists && lse != neg_inf(), lse, delta - dlse};
}

// By the lane that has the row. `kept`: what is kept of its lse.
__device__ __forceinline__ void store_row(const Params& params, const RowOfDelta& x, Accumulator kept) {
  (params.row_lse + offset(params.row_lse_stride, x.batch))[x.row] = x.is_live ? kept : Accumulator(pos_inf());
  (params.delta + offset(params.delta_stride, x.batch))[x.row] = x.is_live ? x.delta : 0;
}

}  // namespace cuflash
