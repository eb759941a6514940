// Who adds to dq when. Sums of floats depend on their order, so CTAs, each of which has the keys of one block, add to a
// block of query rows in turns, by ascending keys: the CTA with the next keys follows one block of rows behind.
// A CTA waits only for CTAs that claimed their work before it, and those are running: no order in which the hardware
// starts CTAs, and nothing else that runs on the device, can make them wait for each other.
#pragma once
#include "blocks.cuh"
#include "fragment.cuh"
#include "locate.cuh"
#include "params.cuh"

namespace cuflash {

constexpr bool kOrdered = kHasDq && kDeterministic;  // CTAs take turns

__device__ __forceinline__ int load_acquire(const int* gmem) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(int* gmem, int x) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(gmem), "r"(x) : "memory");
}

// In shared memory. Thread 0's, but for what it claimed.
struct OrderState {
  int claimed;  // work index
  int block;    // of keys
  int* turn;    // of the query block whose turn this CTA has and has not passed on, or null
  int next_turn;
};

// Heads before key blocks: of one head, as few key blocks as possible are in progress at a time, behind each other.
__device__ __forceinline__ Work locate_ordered_keys(const Params& params, int index) {
  const int heads = owned_count(params);
  return {index / heads, index % heads};
}

// By whole warps, right before their additions: returns when the CTAs with earlier keys have added to rows row0 and
// following. What lane 0 acquires, the warp barrier hands to the others.
__device__ __forceinline__ void await_turn(const Params& params, OrderState& state, int* turn, int row0, int block_m,
                                           int block_n) {
  const int own = state.block - key_blocks(params, row0, min_of(params.seqlen_q, row0 + block_m), block_n).begin;
  if (lane_id() == 0) {
    while (load_acquire(turn) != own) {
    }
  }
  __syncwarp();
  if (threadIdx.x == 0) {
    state.turn = turn;
    state.next_turn = own + 1;
  }
}
// Thread 0, after a barrier of the CTA that follows its additions. No fence: a release covers what the barrier has
// ordered before it, the other threads' additions too.
__device__ __forceinline__ void pass_turn(OrderState& state) {
  if (state.turn == nullptr) return;
  store_release(state.turn, state.next_turn);
  state.turn = nullptr;
}

}  // namespace cuflash
