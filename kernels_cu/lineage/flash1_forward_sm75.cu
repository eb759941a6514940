// FlashAttention-1's forward for sm_75: m16n8k8 or FMAs and copies through registers, as the portable forward has them.
#include "copy_sm75.cuh"
#include "gemm_sm75.cuh"
#include "lineage/flash1_forward.cuh"
