// After the backward of sm_90: dkey_bias is summed over the batch axes on which key_bias was broadcast, from what that
// has left of each batch position. A CTA has 32 keys at a position that is not summed, and its warps share out those
// that are, in a fixed order.
#include "locate.cuh"
#include "fragment.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps;

// A position among those that are summed.
struct Summed {
  int i0, i1, i2;

  __device__ __forceinline__ void advance(const Params& params, int by) {
    i2 += by;
    while (i2 >= params.loop_extent2) {
      i2 -= params.loop_extent2;
      if (++i1 == params.loop_extent1) i1 = 0, ++i0;
    }
  }
};

__device__ __forceinline__ void attention_dkey_bias(const Params& params) {
  __shared__ double sums[kTile.warps][32];
  const int blocks = ceil_div(params.seqlen_k, 32), key = work_index() % blocks * 32 + lane_id();
  const BatchIndex batch = batch_index(params, work_index() / blocks, 0);
  const i64 step2 = params.seqlen_k, step1 = step2 * params.grid_extent2 * params.loop_extent2,
            step0 = step1 * params.grid_extent1 * params.loop_extent1;
  double sum = 0;  // of as many as there are
  if (key < params.seqlen_k) {
    const float* gmem = params.partials + position_number(params, batch) * params.seqlen_k + key;
    Summed at{0, 0, 0};
    at.advance(params, warp_id());
#pragma unroll 4
    for (; at.i0 < params.loop_extent0; at.advance(params, kTile.warps))
      sum += gmem[at.i0 * step0 + at.i1 * step1 + at.i2 * step2];
  }
  sums[warp_id()][lane_id()] = sum;
  __syncthreads();  // all are there
  if (warp_id() > 0 || key >= params.seqlen_k) return;
#pragma unroll
  for (int i = 1; i < kTile.warps; ++i) sum += sums[i][lane_id()];
  base<float>(params.dkey_bias, params.dkey_bias_stride, batch)[key * params.dkey_bias_stride.row] = float(sum);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  cuflash::attention_dkey_bias(params);
}
