// The barriers of a CTA, by number, for some of its threads. Number 0 is __syncthreads'.
#pragma once

namespace cuflash {

template <int kThreads>
__device__ __forceinline__ void barrier_sync(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}
// Counts among the threads, and does not wait for the others.
template <int kThreads>
__device__ __forceinline__ void barrier_arrive(int number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

}  // namespace cuflash
