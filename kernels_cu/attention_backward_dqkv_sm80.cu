// Backward of queries, keys and values at once for sm_80 and later.
#include "copy_sm80.cuh"
#include "gemm_sm80.cuh"
namespace cuflash {
constexpr bool kHasDk = true, kHasDv = true, kHasDq = true;
}
#include "attention_backward_dkv_portable.cuh"
