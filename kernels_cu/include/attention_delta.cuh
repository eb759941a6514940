// Before the backward: what its kernels need of each query row.
//   row_lse = lse, but +inf for a row without keys and for the padding rows: its p is 0
//   delta = rowsum(do * o) - dlse
#pragma once
#include "locate.cuh"
#include "ptx/convert.cuh"

namespace cuflash {

constexpr int kLanesPerRow = 8, kThreads = 32 * kTile.warps;

__device__ __forceinline__ Accumulator dot(const Params& params, const Operand* a, const Operand* b, int lane) {
  constexpr int kChunk = 16 / int(sizeof(Operand));
  struct alignas(16) Chunk {
    Operand x[kChunk];
  };
  Accumulator sum = 0;
  for (int col0 = kChunk * lane; col0 < params.value_dim; col0 += kChunk * kLanesPerRow) {
    if (kLoad == LoadKind::k16 && col0 + kChunk <= params.value_dim) {
      const Chunk ca = *reinterpret_cast<const Chunk*>(a + col0), cb = *reinterpret_cast<const Chunk*>(b + col0);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum += to_float(ca.x[i]) * to_float(cb.x[i]);
    } else {
      for (int i = col0; i < min_of(col0 + kChunk, params.value_dim); ++i)
        sum += to_float(a[i * params.dout_stride.col]) * to_float(b[i * params.o_stride.col]);
    }
  }
#pragma unroll
  for (int step = 1; step < kLanesPerRow; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  return sum;
}

// `unit`: of row_lse, in natural logarithms' terms.
__device__ __forceinline__ void attention_delta(const Params& params, Accumulator unit) {
  constexpr int kRows = kThreads / kLanesPerRow;
  static_assert(kRowPadding % kRows == 0, "padding rows are whole CTAs");
  const int blocks = ceil_div(params.seqlen_q, kRowPadding) * (kRowPadding / kRows);
  const int lane = threadIdx.x % kLanesPerRow, row = work_index() % blocks * kRows + threadIdx.x / kLanesPerRow;
  const BatchIndex batch = batch_index(params, work_index() / blocks, 0);
  const bool exists = row < params.seqlen_q;
  const i64 row_in = exists ? row : 0;  // all lanes of a warp take part in the sum
  Accumulator delta = 0;
  if (params.dout != nullptr && params.value_dim > 0)
    delta = dot(
        params,
        static_cast<const Operand*>(params.dout) + offset(params.dout_stride, batch) + row_in * params.dout_stride.row,
        static_cast<const Operand*>(params.o) + offset(params.o_stride, batch) + row_in * params.o_stride.row, lane);
  if (lane != 0) return;
  const Accumulator lse = params.lse[offset(params.lse_stride, batch) + row_in * params.lse_stride.row];
  if (params.dlse != nullptr) delta -= params.dlse[offset(params.dlse_stride, batch) + row_in * params.dlse_stride.row];
  const bool live = exists && lse != neg_inf();
  (params.row_lse + offset(params.row_lse_stride, batch))[row] = live ? lse * unit : Accumulator(pos_inf());
  (params.delta + offset(params.delta_stride, batch))[row] = live ? delta : 0;
}

}  // namespace cuflash
