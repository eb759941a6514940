// What a forward whose keys were split over the grid has left of its rows, to o and lse: one warp a row or, of many
// splits, a CTA (`key_warps`).
#include "merge_splits.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps;
constexpr int kColumns = 4;  // at a time

struct SharedStorage {
  RowSums<kColumns> warps[kTile.warps];
};

__device__ __forceinline__ void attention_merge_splits(const Params& params, SharedStorage& smem) {
  const bool whole_cta = params.key_warps > 1;
  const i64 index = whole_cta ? i64(work_index()) : i64(work_index()) * kTile.warps + warp_id();
  if (index >= i64(owned_count(params)) * params.seqlen_q) return;
  const int owned = index < params.seqlen_q ? 0 : int(index / params.seqlen_q);
  const int row = int(index - i64(owned) * params.seqlen_q), first = whole_cta ? threadIdx.x : lane_id();
#pragma unroll 1
  for (int column0 = 0; column0 < max_of(1, params.value_dim); column0 += kColumns) {
    RowSums<kColumns> merged;
#pragma unroll 1
    for (int split = first; split < params.splits; split += 32 * params.key_warps)
      merged.merge(load_split<kColumns>(params, index, split, column0));
    merge_threads(merged, smem.warps, whole_cta);
    if (first == 0) store_row(params, owned, row, column0, merged);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  __shared__ cuflash::SharedStorage smem;
  cuflash::attention_merge_splits(params, smem);
}
