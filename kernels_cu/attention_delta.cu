// Before the backward of the portable families.
#include "attention_delta.cuh"

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  const cuflash::RowOfDelta row = cuflash::attention_delta<1>(params);
  if (row.row >= 0) cuflash::store_row(params, row, row.lse);
}
