// Forward for few features on sm_80 and later: key tiles come by cp.async.
#include "copy_sm80.cuh"
#include "attention_narrow.cuh"
