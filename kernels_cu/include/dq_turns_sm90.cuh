// dQ of the backward of sm_90: every CTA that has keys of a block of query rows has a part of its sum. Whoever comes first
// stores its part in global memory, those in the middle add theirs there, and the last one adds what is there to its own
// in registers and writes the result: memory is neither cleared before nor read again after.
//
// Deterministic, CTAs come by ascending keys; each waits for CTAs that claimed their work before it, and those are
// running. Else they come as they do, and draw numbers: whoever is not the first waits for the first one's store, the
// last for all. A number is drawn when nothing that its CTA has to do before depends on others any more, so that no two
// CTAs wait for each other.
#pragma once
#include "blocks.cuh"
#include "params.cuh"

namespace cuflash {

// Of a block of query rows. Zero before a launch and after it.
struct DqTurn {
  u32 done;   // parts that are in memory
  u32 drawn;  // numbers
};

// How one part of dq is to be combined with the others.
struct DqRole {
  int rank, count;  // of so many parts

  __device__ __forceinline__ bool is_first() const { return rank == 0; }
  __device__ __forceinline__ bool is_last() const { return rank == count - 1; }
};

struct DqPart {
  DqRole role;
  int number;  // of the sum and of its turn
};

// Of a CTA with keys of `key_block`, for query rows from row0 on.
__device__ __forceinline__ DqRole ordered_role(const Params& params, int key_block, int row0) {
  const BlockRange keys =
      key_blocks(params, row0, min_of(params.seqlen_q, row0 + kTile.block_m), kTile.block_n);
  return {key_block - keys.begin, keys.end - keys.begin};
}

__device__ __forceinline__ u32 load_acquire(const u32* gmem) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
  return x;
}
__device__ __forceinline__ void add_release(u32* gmem) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(gmem) : "memory");
}

__device__ __forceinline__ void await_parts(const DqTurn& turn, int parts) {
  while (load_acquire(&turn.done) < u32(parts)) {
  }
}

}  // namespace cuflash
