// Softmax of standard attention, in place: a CTA keeps a row of scores on chip, so that it is loaded once and stored
// once. Scores of keys that the row does not see count as -inf, whatever is there; a row without keys gets 0.
#include "lineage/whole_row.cuh"

namespace cuflash {

__device__ __forceinline__ void row_softmax(const SoftmaxParams& params, char* smem) {
  const Row row = row_of(params, blockIdx.x, threadIdx.x, params.lanes);
  const i64 first = row.index + params.band_lo, last = row.index + params.band_hi;
  const auto score = [&](Operand x, int i) { return i >= first && i <= last ? Accumulator(to_float(x)) : neg_inf(); };
  const WholeRow scores = whole_row(row, smem, 0);
  scores.load(row.x);

  Accumulator max = neg_inf();
  scores.for_each([&](const Elements& chunk, int i) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) max = larger(max, score(chunk.x[e], i + e));
  });
  const Accumulator reference = reference_of(combine_max(max, params.lanes));

  // The subtraction comes first, and is nearly exact: a factor taken out of it would round the larger of the two.
  const auto p_of = [&](Operand x, int i) { return exp2_of((score(x, i) - reference) * kLog2E); };
  Accumulator sum = 0;
  scores.for_each([&](const Elements& chunk, int i) {
    Accumulator part = 0;
#pragma unroll
    for (int e = 0; e < kElements; ++e) part += p_of(chunk.x[e], i + e);
    sum += part;
  });
  sum = combine_sum(sum, params.lanes);
  const Accumulator factor = sum == 0 ? 0 : 1 / sum;

  scores.for_each([&](const Elements& chunk, int i) {
    Accumulator p[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) p[e] = p_of(chunk.x[e], i + e) * factor;
    row.store(i, p);
  });
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::SoftmaxParams params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::row_softmax(params, smem);
}
