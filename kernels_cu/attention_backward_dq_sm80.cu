// Backward of queries for sm_80 and later: the portable loop over m16n8k16 and cp.async.
#include "copy_sm80.cuh"
#include "mma_sm80.cuh"
#include "attention_backward_dq_portable.cuh"
