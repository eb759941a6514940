// FlashAttention-1's backward for sm_75: m16n8k8 or FMAs and copies through registers, as the portable kernels have
// them.
#include "copy_sm75.cuh"
#include "gemm_sm75.cuh"
#include "lineage/flash1_backward.cuh"
