// Backward of queries, keys and values at once for sm_80 and later, when the caller allows unordered sums.
#include "copy_sm80.cuh"
#include "mma_sm80.cuh"
namespace cuflash {
constexpr bool kHasDk = true, kHasDv = true, kHasDq = true;
}
#include "attention_backward_dkv_portable.cuh"
