// What a forward whose keys were split over the grid has left of its rows, to o and lse: one warp a row.
#include "merge_splits.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps;

__device__ __forceinline__ void attention_merge_splits(const Params& params) {
  const i64 index = i64(work_index()) * kTile.warps + warp_id();
  if (index >= i64(owned_count(params)) * params.seqlen_q) return;
  merge_row(params, int(index / params.seqlen_q), int(index % params.seqlen_q));
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  cuflash::attention_merge_splits(params);
}
