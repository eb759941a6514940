// Before the backward of sm_90, which starts under this kernel.
#include "attention_delta.cuh"
#include "ptx/grid.cuh"
#include "recompute_sm90.cuh"

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  cuflash::grid_launch_dependents();
  cuflash::attention_delta<4>(params, cuflash::kept_lse);
}
