// FlashAttention-1's forward for sm_80 and later: tensor cores and cp.async, as the portable forward has them.
#include "copy_sm80.cuh"
#include "gemm_sm80.cuh"
#include "lineage/flash1_forward.cuh"
