// Results over disjoint key sets, merged: lse = log sum exp(lse_i), o = sum exp(lse_i - lse) o_i, parts in the given
// order, in lse's type. A part that saw no key (lse_i = -inf) is not read; without any, o = 0 and lse = -inf.
#include "fragment.cuh"
#include "locate.cuh"
#include "ptx/convert.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps;

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }

__device__ __forceinline__ void attention_merge(const MergeParams& params) {
  const i64 index = i64(work_index()) * kTile.warps + warp_id();  // one warp a row
  const int lane = lane_id();
  if (index >= i64(params.extent0) * params.extent1 * params.extent2 * params.rows) return;
  const BatchIndex batch = unravel(int(index / params.rows), params.extent1, params.extent2);
  const i64 row = index % params.rows;
  const bool stacked = params.stacked != 0;
  const auto lse_of = [&](int part) {
    const MergePart& source = params.part[stacked ? 0 : part];
    const i64 at =
        offset(source.lse_stride, batch) + row * source.lse_stride.row + (stacked ? part * params.lse_part_stride : 0);
    return static_cast<const Accumulator*>(source.lse)[at];
  };
  const auto o_of = [&](int part, int col) {
    const MergePart& source = params.part[stacked ? 0 : part];
    const i64 at = offset(source.o_stride, batch) + row * source.o_stride.row + col * source.o_stride.col;
    return Accumulator(
        to_float(static_cast<const Operand*>(source.o)[at + (stacked ? part * params.o_part_stride : 0)]));
  };

  const Accumulator empty = neg_inf();
  Accumulator max = empty, sum = 0;
  for (int part = 0; part < params.parts; ++part) {
    const Accumulator lse = lse_of(part);
    if (lse > max || lse != lse) max = lse;  // a NaN stays: it compares false from then on
  }
  // By comparison, so that a lone +inf weighs 1 too, where the difference is NaN.
  const auto weight_of = [&](int part) {
    const Accumulator lse = lse_of(part);
    return lse == empty ? Accumulator(0) : lse == max ? Accumulator(1) : exponential(lse - max);
  };
  for (int part = 0; part < params.parts; ++part) sum += weight_of(part);
  const bool live = max != empty;
  if (lane == 0) {
    Accumulator* lse_gmem = static_cast<Accumulator*>(params.lse) + offset(params.lse_stride, batch);
    lse_gmem[row * params.lse_stride.row] = live ? max + logarithm(sum) : empty;
  }
  Output* o_gmem = static_cast<Output*>(params.o) + offset(params.o_stride, batch) + row * params.o_stride.row;
  for (int col = lane; col < params.value_dim; col += 32) {
    Accumulator o = -0.f;  // the neutral element of addition: +0 would turn a lone -0 into +0
    for (int part = 0; part < params.parts; ++part) {
      const Accumulator weight = weight_of(part);
      if (weight != 0) o += weight * o_of(part, col);
    }
    o_gmem[col * params.o_stride.col] = from_float<Output>(live ? o / sum : Accumulator(0));
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::MergeParams params) {
  cuflash::attention_merge(params);
}
