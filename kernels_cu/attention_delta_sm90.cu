// Before the backward of sm_90, which starts under this kernel.
#include "attention_delta.cuh"
#include "ptx/grid.cuh"
#include "recompute_sm90.cuh"
#include "row_terms_sm90.cuh"

namespace cuflash {

__device__ __forceinline__ void attention_delta(const Params& params) {
  grid_launch_dependents();
  const RowOfDelta x = attention_delta<4>(params);
  if (x.row < 0) return;
  const float kept = kept_lse(x.lse);
  store_row(params, x, kept);
  const bool has_terms = params.row_terms != nullptr;
  if (has_terms) {
    RowTerms* const of_batch = static_cast<RowTerms*>(params.row_terms) + offset(params.row_lse_stride, x.batch);
    of_batch[x.row] = row_terms(x.is_live, x.lse, x.delta, params.scale);
  }
  if (params.careful == nullptr || !x.is_live) return;
  if (has_terms ? needs_care(x.lse, x.delta) : is_large(kept)) *params.careful = 1;
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  cuflash::attention_delta(params);
}
