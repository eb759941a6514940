// Backward of keys and values for sm_80 and later: the portable loop over tensor cores and cp.async.
#include "copy_sm80.cuh"
#include "gemm_sm80.cuh"
namespace cuflash {
constexpr bool kHasDk = true, kHasDv = true, kHasDq = false;
}
#include "attention_backward_dkv_portable.cuh"
