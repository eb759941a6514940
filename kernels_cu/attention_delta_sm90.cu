// Before the backward of sm_90, which takes lse as an exponent of 2 and starts under this kernel.
#include "attention_delta.cuh"
#include "ptx/grid.cuh"

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  cuflash::grid_launch_dependents();
  cuflash::attention_delta<4>(params, cuflash::kLog2E);
}
