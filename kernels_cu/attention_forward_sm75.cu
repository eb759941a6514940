// Forward for sm_75: the portable loop over m16n8k8 or FMAs and copies through registers.
#include "copy_sm75.cuh"
#include "gemm_sm75.cuh"
#include "attention_forward_portable.cuh"
