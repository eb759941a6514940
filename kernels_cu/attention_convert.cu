// After the unordered backward: dq = scale * dq_accum, from register order to the output's type and strides.
#include "fragment.cuh"
#include "locate.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps;

// One warp a tile of 16 rows.
__device__ __forceinline__ void attention_convert(const Params& p) {
  const int row_tiles = ceil_div(p.seqlen_q, 16), blocks = ceil_div(row_tiles, kTile.warps);
  const int row0 = (work_index() % blocks * kTile.warps + warp_id()) * 16;
  if (row0 >= p.seqlen_q) return;
  const BatchIndex batch = batch_index(p, work_index() / blocks, 0);
  const float* dq_accum_gmem = p.dq_accum + offset(p.dq_accum_stride, batch) + row0 * p.dq_accum_stride.row;
  Output* dq_gmem = static_cast<Output*>(p.dq) + offset(p.dq_stride, batch) + row0 * p.dq_stride.row;
  for (int col0 = 0; col0 < p.head_dim; col0 += 8) {
    Fragment<1, 8> dq;
    dq.for_each_in_order([&](float& x, int index) { x = dq_accum_gmem[16 * col0 + index]; });
    dq.for_each([&](float& x, int, int row, int col) {
      if (row0 + row < p.seqlen_q && col0 + col < p.head_dim)
        dq_gmem[row * p.dq_stride.row + (col0 + col) * p.dq_stride.col] = from_float<Output>(x * p.scale);
    });
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1) KERNEL(const __grid_constant__ cuflash::Params p) {
  cuflash::attention_convert(p);
}
