// Backward of queries for sm_80 and later: the portable loop over tensor cores and cp.async.
#include "copy_sm80.cuh"
#include "gemm_sm80.cuh"
#include "attention_backward_dq_portable.cuh"
