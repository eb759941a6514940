// Rows of an array of any strides, shared between threads: what the softmaxes of the lineage have in common. They
// differ in how often they go over a row, so going over it is a function, and each call of it is one load of the row.
#pragma once
#include "fragment.cuh"
#include "params.cuh"
#include "ptx/convert.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps;

struct SoftmaxParams {
  const void* x;         // rows of `length` elements
  void* y;               // as x, or null: the maximum and the sum of a row alone
  Accumulator* row_max;  // one element a row, or null
  Accumulator* row_sum;
  i64 x_batch[3], y_batch[3], statistics_batch[3];  // in elements, along the three axes of rows
  i64 x_step, y_step;                               // from element to element of a row
  i64 length;
  int extent0, extent1, extent2;
  int lanes;             // threads that share a row: 1, 32 or all of a CTA
  int band_lo, band_hi;  // of rows that are scores: row i of the last axis sees element j iff i + lo <= j <= i + hi
};
static_assert(sizeof(SoftmaxParams) == 152, "the host packs the same bytes");

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float exp2_of(float x) { return ex2(x); }
__device__ __forceinline__ double exp2_of(double x) { return exp2(x); }

// The weight of a sum whose reference was `old` against a new one, no smaller. Equal ones are compared, not
// subtracted: of infinities that would be NaN.
__device__ __forceinline__ Accumulator rescale(Accumulator old, Accumulator now) {
  return old == now ? 1 : exponential(old - now);
}

// What is subtracted in exponents: the maximum, but 0 while it is -inf.
__device__ __forceinline__ Accumulator reference_of(Accumulator max) { return max == neg_inf() ? 0 : max; }

// A sum of many terms, by Kahan: rows may be so long that a chain of plain additions drifts.
struct LongSum {
  Accumulator total = 0, excess = 0;

  __device__ __forceinline__ void add(Accumulator x) {
    const Accumulator term = add_rn(x, -excess), sum = add_rn(total, term);
    excess = add_rn(add_rn(sum, -total), -term);
    total = sum;
  }
  __device__ __forceinline__ void scale(Accumulator by) { total *= by, excess *= by; }
};

// Elements that a thread takes at once, and how they lie in memory.
constexpr int kElements = kLoad == LoadKind::k16 ? 16 / int(sizeof(Operand)) : 1;
struct alignas(kElements * sizeof(Operand)) Elements {
  Operand x[kElements];
};

// One row, as the thread `lane` of `lanes` that share it sees it.
struct Row {
  const Operand* x;
  Operand* y;
  i64 x_step, y_step, length, statistics, index;
  int lane, lanes;

  __device__ __forceinline__ bool exists() const { return x != nullptr; }

  // f(first index, values in the accumulation dtype) for this thread's elements: one load of the row.
  template <class F>
  __device__ __forceinline__ void load(F f) const {
    for (i64 i = i64(lane) * kElements; i < length; i += i64(lanes) * kElements) {
      const Elements chunk = *reinterpret_cast<const Elements*>(x + i * (kElements > 1 ? 1 : x_step));
      Accumulator values[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) values[e] = to_float(chunk.x[e]);
      f(i, values);
    }
  }

  __device__ __forceinline__ void store(i64 i, const Accumulator (&values)[kElements]) const {
    Elements chunk;
#pragma unroll
    for (int e = 0; e < kElements; ++e) chunk.x[e] = from_float<Operand>(values[e]);
    *reinterpret_cast<Elements*>(y + i * (kElements > 1 ? 1 : y_step)) = chunk;
  }
};

__device__ __forceinline__ Row row_of(const SoftmaxParams& params, i64 index, int lane, int lanes) {
  Row row{};
  if (index >= i64(params.extent0) * params.extent1 * params.extent2) return row;
  const i64 i2 = index % params.extent2, i1 = index / params.extent2 % params.extent1,
            i0 = index / params.extent2 / params.extent1;
  const auto offset = [&](const i64(&batch)[3]) { return i0 * batch[0] + i1 * batch[1] + i2 * batch[2]; };
  row.x = static_cast<const Operand*>(params.x) + offset(params.x_batch);
  if (params.y != nullptr) row.y = static_cast<Operand*>(params.y) + offset(params.y_batch);
  row.x_step = params.x_step, row.y_step = params.y_step, row.length = params.length;
  row.statistics = offset(params.statistics_batch);
  row.index = i2;
  row.lane = lane, row.lanes = lanes;
  return row;
}

// This thread's row where 1, 32 or all threads of a CTA share one.
__device__ __forceinline__ Row shared_row(const SoftmaxParams& params) {
  const int lanes = params.lanes;
  return row_of(params, i64(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes, threadIdx.x % lanes, lanes);
}

// Combines what the threads that share a row have found; all of them get the same. All threads of the CTA take part.
// merge(a, b): associative, the same in every order up to rounding.
template <class T, class Merge>
__device__ __forceinline__ T combine(T own, int lanes, Merge merge) {
  if (lanes == 1) return own;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own = merge(own, own.from_lane(step));
  if (lanes == 32) return own;
  __shared__ T of_warp[kTile.warps];
  __syncthreads();  // what an earlier call left is read
  if (lane_id() == 0) of_warp[warp_id()] = own;
  __syncthreads();  // what each warp has found is there
  own = of_warp[0];
  for (int warp = 1; warp < lanes / 32; ++warp) own = merge(own, of_warp[warp]);
  return own;
}

struct Maximum {
  Accumulator x;
  __device__ __forceinline__ Maximum from_lane(int step) const { return {__shfl_xor_sync(kFullWarp, x, step)}; }
};
struct Sum {
  Accumulator x;
  __device__ __forceinline__ Sum from_lane(int step) const { return {__shfl_xor_sync(kFullWarp, x, step)}; }
};
__device__ __forceinline__ Accumulator combine_max(Accumulator x, int lanes) {
  return combine(Maximum{x}, lanes, [](Maximum a, Maximum b) { return Maximum{larger(a.x, b.x)}; }).x;
}
__device__ __forceinline__ Accumulator combine_sum(Accumulator x, int lanes) {
  return combine(Sum{x}, lanes, [](Sum a, Sum b) { return Sum{a.x + b.x}; }).x;
}

// The last load of a row, and its store: exp(x - max) / sum.
__device__ __forceinline__ void store_softmax(const Row& row, Accumulator max, Accumulator sum) {
  const Accumulator reference = reference_of(max);
  row.load([&](i64 i, Accumulator(&values)[kElements]) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) values[e] = exponential(values[e] - reference) / sum;
    row.store(i, values);
  });
}

}  // namespace cuflash
