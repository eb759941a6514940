// The softmax's part of the backward of standard attention: ds = p (dp - rowsum(p dp)), in the place of dp. A CTA keeps
// a row of both on chip: two loads and one store.
#include "lineage/whole_row.cuh"

namespace cuflash {

__device__ __forceinline__ void row_softmax_backward(const SoftmaxParams& params, char* smem) {
  const Row row = row_of(params, blockIdx.x, threadIdx.x, params.lanes);
  const WholeRow p = whole_row(row, smem, 0), dp = whole_row(row, smem, 1);
  p.load(row.x);
  dp.load(row.y);

  Accumulator sum = 0;
  p.for_each([&](const Elements& chunk, int i) {
    const Elements& other = dp.chunks[i / kElements];
    Accumulator part = 0;
#pragma unroll
    for (int e = 0; e < kElements; ++e) part += Accumulator(to_float(chunk.x[e])) * Accumulator(to_float(other.x[e]));
    sum += part;
  });
  const Accumulator delta = combine_sum(sum, params.lanes);

  p.for_each([&](const Elements& chunk, int i) {
    const Elements& other = dp.chunks[i / kElements];
    Accumulator ds[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) ds[e] = to_float(chunk.x[e]) * (to_float(other.x[e]) - delta);
    row.store(i, ds);
  });
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::SoftmaxParams params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::row_softmax_backward(params, smem);
}
