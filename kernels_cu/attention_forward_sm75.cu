// Forward for sm_75: the portable loop over m16n8k8 and copies through registers.
#include "copy_sm75.cuh"
#include "mma_sm75.cuh"
#include "attention_forward_portable.cuh"
