// Backward of values alone (at these head dims one accumulator fits the registers) for sm_80 and later: the portable
// loop over tensor cores and cp.async.
#include "copy_sm80.cuh"
#include "gemm_sm80.cuh"
namespace cuflash {
constexpr bool kHasDk = false, kHasDv = true, kHasDq = false;
}
#include "attention_backward_dkv_portable.cuh"
