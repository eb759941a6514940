// Floats to planes of bfloat16 (planes.cuh), which the forward of sm_90 multiplies: rows of q, then of k, then of v,
// some to a warp. Arrays may have any strides; planes lie so that the copy engine can take them.
#include "fragment.cuh"
#include "locate.cuh"
#include "planes.cuh"

namespace cuflash {

struct Source {
  const void* x;
  void* planes;
  const Strides &x_stride, &planes_stride;
  int length, cols;

  // A broadcast axis is there once.
  __device__ __forceinline__ int extent(int axis, int whole) const {
    return planes_stride.batch[axis] == 0 ? 1 : whole;
  }
};

constexpr int kWarpRows = 8;

// Rows of group `index` of an array, or false where there are less; then index counts on in the next array.
__device__ __forceinline__ bool split_rows_of(const Params& params, const Source& from, int& index) {
  const int extent1 = from.extent(1, params.grid_extent1), extent2 = from.extent(2, params.grid_extent2);
  const int batches = from.extent(0, params.grid_extent0) * extent1 * extent2;
  const int groups = ceil_div(from.length, kWarpRows);
  if (index >= batches * groups) {
    index -= batches * groups;
    return false;
  }
  const int row0 = index % groups * kWarpRows, rows = min_of(kWarpRows, from.length - row0);
  const BatchIndex batch = unravel(index / groups, extent1, extent2);
  const float* x_gmem = base<float>(from.x, from.x_stride, batch) + row0 * from.x_stride.row;
  BFloat16* to = base<BFloat16>(from.planes, from.planes_stride, batch) + row0 * from.planes_stride.row;
  const i64 plane_stride = i64(batches) * from.length * from.planes_stride.row;
  for (int col = 2 * lane_id(); col < from.cols; col += 64) {
    float pair[kWarpRows][2];  // all on their way before the first is used
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        pair[row][i] =
            row < rows && col + i < from.cols ? x_gmem[row * from.x_stride.row + (col + i) * from.x_stride.col] : 0.f;
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      if (row >= rows) break;
      u32 planes[kPlanes];
      split_pair<BFloat16>(pair[row][0], pair[row][1], planes);
#pragma unroll
      for (int i = 0; i < kPlanes; ++i)
        *reinterpret_cast<u32*>(to + i * plane_stride + row * from.planes_stride.row + col) = planes[i];
    }
  }
  return true;
}

__device__ __forceinline__ void split_planes(const Params& params) {
  int index = blockIdx.x * kTile.warps + warp_id();
  const Source q{params.q, params.q_planes, params.q_stride, params.q_planes_stride, params.seqlen_q, params.head_dim};
  const Source k{params.k, params.k_planes, params.k_stride, params.k_planes_stride, params.seqlen_k, params.head_dim};
  const Source v{params.v, params.v_planes, params.v_stride, params.v_planes_stride, params.seqlen_k, params.value_dim};
  if (split_rows_of(params, q, index) || split_rows_of(params, k, index)) return;
  split_rows_of(params, v, index);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * cuflash::kTile.warps)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  cuflash::split_planes(params);
}
