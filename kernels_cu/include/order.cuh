// Who adds to dq when. Sums of floats depend on their order, so CTAs, each of which has the keys of one block, add to a
// block of query rows in turns, by ascending keys: the CTA with the next keys follows one block of rows behind.
// A CTA waits only for CTAs that claimed their work before it, and those are running: no order in which the hardware
// starts CTAs, and nothing else that runs on the device, can make them wait for each other.
#pragma once
#include "blocks.cuh"
#include "locate.cuh"
#include "params.cuh"

namespace cuflash {

__device__ __forceinline__ int load_acquire(const int* gmem) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(int* gmem, int x) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(gmem), "r"(x) : "memory");
}

// In shared memory; thread 0's, but for `claimed`.
struct OrderState {
  int claimed;  // work index
  int next_turn;
  int* turn;  // of the query block whose turn this CTA has and has not passed on, or null
};

// Heads before key blocks: of one head, as few key blocks as possible are in progress at a time, behind each other.
__device__ __forceinline__ Work locate_ordered_keys(const Params& params, int index) {
  const int heads = params.grid_extent0 * params.grid_extent1 * params.grid_extent2;
  return {index / heads, index % heads};
}

// Thread 0, before a barrier of the CTA: returns when the CTAs with earlier keys have added to rows row0 and following.
__device__ __forceinline__ void await_turn(const Params& params, OrderState& state, int* turn, int key_block, int row0,
                                           int block_m, int block_n) {
  const int first = key_blocks(params, row0, min_of(params.seqlen_q, row0 + block_m), block_n).begin;
  while (load_acquire(turn) != key_block - first) {
  }
  state.turn = turn;
  state.next_turn = key_block - first + 1;
}
// Thread 0, after a barrier of the CTA that follows its additions.
__device__ __forceinline__ void pass_turn(OrderState& state) {
  if (state.turn == nullptr) return;
  __threadfence();  // what the CTA has added, which the barrier has ordered before this, comes before the turn
  store_release(state.turn, state.next_turn);
  state.turn = nullptr;
}

}  // namespace cuflash
