// Forward for few features before sm_80: key tiles come through registers.
#include "copy_sm75.cuh"
#include "attention_narrow.cuh"
