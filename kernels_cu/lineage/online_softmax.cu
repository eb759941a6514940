// Softmax in two passes over a row (Milakov and Gimelshein 2018, Algorithm 3): maximum and sum together, the sum
// rescaled whenever the maximum grows; then the quotients. Two loads and one store of each element. Without y the first
// pass alone: a pair of maximum and sum for each row, which merges with those of other parts of the row.
#include "lineage/rows.cuh"

namespace cuflash {

// sum: of exp(x - max) over the elements so far.
struct Statistics {
  Accumulator max, sum;

  __device__ __forceinline__ Statistics from_lane(int step) const {
    return {__shfl_xor_sync(kFullWarp, max, step), __shfl_xor_sync(kFullWarp, sum, step)};
  }
};

__device__ __forceinline__ Statistics merge(const Statistics& a, const Statistics& b) {
  const Accumulator max = larger(a.max, b.max);
  return {max, a.sum * rescale(a.max, max) + b.sum * rescale(b.max, max)};
}

// What this thread has of its row.
__device__ __forceinline__ Statistics statistics_of(const Row& row) {
  Accumulator max = neg_inf();
  LongSum sum;
  row.load([&](i64, const Accumulator(&values)[kElements]) {
    Accumulator larger_max = max, part = 0;
#pragma unroll
    for (int e = 0; e < kElements; ++e) larger_max = larger(larger_max, values[e]);
    if (larger_max > max) {
      sum.scale(rescale(max, larger_max));
      max = larger_max;
    }
    const Accumulator reference = reference_of(max);
#pragma unroll
    for (int e = 0; e < kElements; ++e) part += exponential(values[e] - reference);
    sum.add(part);
  });
  return {max, sum.total};
}

__device__ __forceinline__ void online_softmax(const SoftmaxParams& params) {
  const Row row = shared_row(params);
  Statistics own{neg_inf(), 0};
  if (row.exists()) own = statistics_of(row);
  const Statistics all = combine(own, params.lanes, merge);
  if (!row.exists()) return;
  if (row.y != nullptr) store_softmax(row, all.max, all.sum);
  if (params.row_max != nullptr && row.lane == 0) {
    params.row_max[row.statistics] = all.max;
    params.row_sum[row.statistics] = all.sum;
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::SoftmaxParams params) {
  cuflash::online_softmax(params);
}
