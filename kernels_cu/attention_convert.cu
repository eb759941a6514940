// After the fused backward: dq = scale * dq_accum, from register order to the output's type and strides.
#include "pack_sm80.cuh"
#include "epilogue.cuh"
#include "locate.cuh"
#include "red.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps;

// One warp a tile of 16 rows, 128 bytes of each at a time.
__device__ __forceinline__ void attention_convert(const Params& params) {
  constexpr int kCols = 128 / int(sizeof(Output));
  __shared__ SharedTile<Output, 16 * kTile.warps, kCols> tile;
  const int row_tiles = ceil_div(params.seqlen_q, 16), blocks = ceil_div(row_tiles, kTile.warps);
  const int block_row0 = work_index() % blocks * kTile.warps * 16, row0 = block_row0 + warp_id() * 16;
  if (row0 >= params.seqlen_q) return;
  const BatchIndex batch = batch_index(params, work_index() / blocks, 0);
  const Accumulator* lane_gmem =
      params.dq_accum + offset(params.dq_accum_stride, batch) + row0 * params.dq_accum_stride.row + lane_index();
  Output* dq_gmem = base<Output>(params.dq, params.dq_stride, batch);
  for (int col0 = 0; col0 < params.head_dim; col0 += kCols) {
    Fragment<1, kCols> dq;
    dq.for_each_tile([&](Accumulator(&x)[4], int, int col) { load_tile_sums(x, lane_gmem + 16 * (col0 + col)); });
    dq.for_each([&](Accumulator& x, int, int, int) { x *= params.scale; });
    store_rows(dq, tile, warp_id() * 16, 0, dq_gmem + col0 * params.dq_stride.col, params.dq_stride, block_row0,
               params.seqlen_q, params.head_dim - col0, params.store_vector != 0);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  cuflash::attention_convert(params);
}
