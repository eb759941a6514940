// Before the backward: what its kernels need of each query row.
//   row_lse = lse, but +inf for a row without keys and for the padding rows: its p is 0
//   delta = rowsum(do * o) - dlse
#include "locate.cuh"
#include "ptx/convert.cuh"

namespace cuflash {

constexpr int kLanesPerRow = 8, kThreads = 32 * kTile.warps;
constexpr int kRowPadding = 128;

__device__ __forceinline__ float dot(const Params& p, const Operand* a, const Operand* b, int lane) {
  float sum = 0.f;
  for (int col0 = 8 * lane; col0 < p.value_dim; col0 += 8 * kLanesPerRow) {
    if (kLoad == LoadKind::k16 && col0 + 8 <= p.value_dim) {
      const uint4 va = *reinterpret_cast<const uint4*>(a + col0), vb = *reinterpret_cast<const uint4*>(b + col0);
      const u32 wa[4] = {va.x, va.y, va.z, va.w}, wb[4] = {vb.x, vb.y, vb.z, vb.w};
#pragma unroll
      for (int i = 0; i < 8; ++i)
        sum +=
            to_float(Operand{u16(wa[i / 2] >> (16 * (i % 2)))}) * to_float(Operand{u16(wb[i / 2] >> (16 * (i % 2)))});
    } else {
      for (int i = col0; i < min_of(col0 + 8, p.value_dim); ++i)
        sum += to_float(a[i * p.dout_stride.col]) * to_float(b[i * p.o_stride.col]);
    }
  }
#pragma unroll
  for (int step = 1; step < kLanesPerRow; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  return sum;
}

__device__ __forceinline__ void attention_delta(const Params& p) {
  const int padded = ceil_div(p.seqlen_q, kRowPadding) * kRowPadding, lane = threadIdx.x % kLanesPerRow;
  constexpr int kRows = kThreads / kLanesPerRow;
  const int row = blockIdx.x % (padded / kRows) * kRows + threadIdx.x / kLanesPerRow;
  const BatchIndex batch = batch_index(p, blockIdx.x / (padded / kRows), 0);
  const bool exists = row < p.seqlen_q;
  const i64 row_in = exists ? row : 0;  // all lanes of a warp take part in the sum
  float delta = 0.f;
  if (p.dout != nullptr && p.value_dim > 0)
    delta = dot(p, static_cast<const Operand*>(p.dout) + offset(p.dout_stride, batch) + row_in * p.dout_stride.row,
                static_cast<const Operand*>(p.o) + offset(p.o_stride, batch) + row_in * p.o_stride.row, lane);
  if (lane != 0) return;
  const float lse = p.lse[offset(p.lse_stride, batch) + row_in * p.lse_stride.row];
  if (p.dlse != nullptr) delta -= p.dlse[offset(p.dlse_stride, batch) + row_in * p.dlse_stride.row];
  const bool live = exists && lse != neg_inf();
  (p.row_lse + offset(p.row_lse_stride, batch))[row] = live ? lse : pos_inf();
  (p.delta + offset(p.delta_stride, batch))[row] = live ? delta : 0.f;
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1) KERNEL(const __grid_constant__ cuflash::Params p) {
  cuflash::attention_delta(p);
}
