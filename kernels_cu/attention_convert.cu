// After the fused backward: dq = scale * dq_accum, from register order to the output's type and strides.
#include "fragment.cuh"
#include "locate.cuh"
#include "ptx/convert.cuh"
#include "red.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps;

// One warp a tile of 16 rows.
__device__ __forceinline__ void attention_convert(const Params& params) {
  const int row_tiles = ceil_div(params.seqlen_q, 16), blocks = ceil_div(row_tiles, kTile.warps);
  const int row0 = (work_index() % blocks * kTile.warps + warp_id()) * 16;
  if (row0 >= params.seqlen_q) return;
  const BatchIndex batch = batch_index(params, work_index() / blocks, 0);
  const Accumulator* dq_accum_gmem =
      params.dq_accum + offset(params.dq_accum_stride, batch) + row0 * params.dq_accum_stride.row;
  Output* dq_gmem = static_cast<Output*>(params.dq) + offset(params.dq_stride, batch) + row0 * params.dq_stride.row;
  for (int col0 = 0; col0 < params.head_dim; col0 += 8) {
    Fragment<1, 8> dq;
#pragma unroll
    for (int i = 0; i < 4; ++i) dq.x[0][0][i] = dq_accum_gmem[16 * col0 + register_index(i)];
    dq.for_each([&](Accumulator& x, int, int row, int col) {
      if (row0 + row < params.seqlen_q && col0 + col < params.head_dim)
        dq_gmem[row * params.dq_stride.row + (col0 + col) * params.dq_stride.col] =
            from_float<Output>(x * params.scale);
    });
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  cuflash::attention_convert(params);
}
