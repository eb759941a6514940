// Kernels of a stream that overlap (sm_90): one may be launched so that it starts before the one ahead of it has ended.
#pragma once

namespace cuflash {

// The next kernel may start as soon as all CTAs have come here or ended.
__device__ __forceinline__ void grid_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Until the kernel ahead has ended and what it has written is there.
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace cuflash
