// Backward of keys and values for sm_75: the portable loop over m16n8k8 or FMAs and copies through registers.
#include "copy_sm75.cuh"
#include "gemm_sm75.cuh"
namespace cuflash {
constexpr bool kHasDk = true, kHasDv = true, kHasDq = false;
}
#include "attention_backward_dkv_portable.cuh"
