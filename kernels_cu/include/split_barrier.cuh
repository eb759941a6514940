// A barrier of the CTA in two halves, with work between them that needs nothing of other warps.
#pragma once
#include "fragment.cuh"
#include "ptx/mbarrier.cuh"

namespace cuflash {

// In shared memory. Its phases alternate in parity, from 0.
struct SplitBarrier {
  u64 state;

  // One thread, between barriers of the CTA.
  __device__ __forceinline__ void start(bool again) {
    if (again) mbarrier_invalidate(state);
    mbarrier_init(state, 32 * kTile.warps);
  }
  // By all threads, each for itself: what they have done before this comes before what follows wait() in all.
  __device__ __forceinline__ void arrive() { mbarrier_arrive(state); }
  __device__ __forceinline__ void wait(u32 parity) const {
    while (!mbarrier_test(state, parity)) {
    }
    __syncwarp();
  }
};

}  // namespace cuflash
