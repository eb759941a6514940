// FlashAttention-1's backward for sm_80 and later: tensor cores and cp.async, as the portable kernels have them.
#include "copy_sm80.cuh"
#include "gemm_sm80.cuh"
#include "lineage/flash1_backward.cuh"
