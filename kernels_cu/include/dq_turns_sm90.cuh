// dQ of the backward of sm_90: every CTA that has keys of a block of query rows has a part of its sum. Whoever comes
// first stores its part in global memory, those in the middle add theirs there, and the last one adds what is there to
// its own in registers and writes the result: memory is neither cleared before nor read again after.
//
// Deterministic, CTAs come by descending keys, as they claim them: each waits for CTAs that claimed their work before
// it, and those are running. Else they come as they do, and draw numbers: whoever is not the first waits for the first
// one's store, the last for all. A CTA draws its numbers one after the other, in the order of its steps, and waits only
// for what was drawn before: so no CTAs wait for each other, however early they draw.
//
// Sums of dk and dv that CTAs share are formed alike. Those of a block of keys have one draw in common.
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

// Where a CTA begins among the query blocks that see its keys. Those of one head are to be at different sums. Under a
// causal band the CTA with the keys before comes two steps later everywhere. Without one they follow each other so only
// where nobody waits for them: deterministic, CTAs would wait for work that nobody has claimed yet.
__device__ __forceinline__ int first_row_block(const Params& params, const BlockRange& rows, int key_block,
                                               int n_blocks) {
  if (kDeterministic) return rows.begin;
  const int own = int(__fdividef(float(key_block), float(n_blocks)) * float(ceil_div(params.seqlen_q, kTile.block_m)));
  return max_of(rows.begin, min_of(rows.end - 1, own));
}

// Of a CTA with keys of `key_block`, for query rows from row0 on.
__device__ __forceinline__ DqRole ordered_role(const Params& params, int key_block, int row0) {
  const BlockRange keys = key_blocks(params, row0, min_of(params.seqlen_q, row0 + kTile.block_m), kTile.block_n);
  return {keys.end - 1 - key_block, keys.end - keys.begin};
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
