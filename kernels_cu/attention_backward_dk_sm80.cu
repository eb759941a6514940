// Backward of keys alone (at these head dims one accumulator fits the registers) for sm_80 and later: the portable loop
// over m16n8k16 and cp.async.
#include "copy_sm80.cuh"
#include "mma_sm80.cuh"
namespace cuflash {
constexpr bool kHasDk = true, kHasDv = false, kHasDq = false;
}
#include "attention_backward_dkv_portable.cuh"
