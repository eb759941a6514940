// Softmax in three passes over a row (Milakov and Gimelshein 2018, Algorithm 2): its maximum, which keeps exponentials
// from overflowing; their sum; the quotients. Three loads and one store of each element.
#include "lineage/rows.cuh"

namespace cuflash {

__device__ __forceinline__ void safe_softmax(const SoftmaxParams& params) {
  const Row row = shared_row(params);
  Accumulator max = neg_inf();
  if (row.exists())
    row.load([&](i64, const Accumulator(&values)[kElements]) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) max = larger(max, values[e]);
    });
  max = combine_max(max, params.lanes);

  LongSum sum;
  const Accumulator reference = reference_of(max);
  if (row.exists())
    row.load([&](i64, const Accumulator(&values)[kElements]) {
      Accumulator part = 0;
#pragma unroll
      for (int e = 0; e < kElements; ++e) part += exponential(values[e] - reference);
      sum.add(part);
    });
  const Accumulator total = combine_sum(sum.total, params.lanes);

  if (row.exists()) store_softmax(row, max, total);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::SoftmaxParams params) {
  cuflash::safe_softmax(params);
}
