// From a work index to the segment it stands for. Other layouts of sequences change this file alone.
#pragma once
#include "common.cuh"
#include "params.cuh"

namespace cuflash {

// The CTA's work index. Volatile: read and divided again in the epilogue, not held in registers over the main loop.
__device__ __forceinline__ int work_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ int owned_count(const Params& params) {
  return params.grid_extent0 * params.grid_extent1 * params.grid_extent2;
}

// The tile and the owned batch position that a CTA works on.
struct Work {
  int block, owned;
};
// Longest tiles first: under a causal band the last rows see the most keys, and the first keys are seen by most rows.
__device__ __forceinline__ Work locate_rows(int m_blocks) {
  const int index = work_index();
  return {m_blocks - 1 - index % m_blocks, index / m_blocks};
}
// The same where the grid also shares out the keys of a tile of `rows` of `seqlen_q` rows in `splits` parts. A single
// tile needs no divisions: nobody has fetched those yet, and where queries are few it is the start that counts.
struct SplitWork {
  int block, split, owned;
};
__device__ __forceinline__ SplitWork locate_split_rows(int seqlen_q, int rows, int splits) {
  const int index = work_index();
  if (int(gridDim.x) == splits) return {0, index, 0};
  const int m_blocks = ceil_div(seqlen_q, rows), rest = index / m_blocks;
  return {m_blocks - 1 - index % m_blocks, rest % splits, rest / splits};
}
// Blocks of keys [begin, end) of this part: parts differ by a block at most. No 64-bit division: at the start of a
// kernel nothing else is under way.
struct SplitBlocks {
  int begin, end;

  __device__ __forceinline__ SplitBlocks(int first, int count, int split, int splits) {
    const int share = count / splits, more = count - share * splits;
    begin = first + share * split + min_of(split, more);
    end = begin + share + (split < more ? 1 : 0);
  }
};
// Block `index` of all, of so many a batch position: within a section of positions, first the first block of each. The
// last section also has what positions are left, and so many tiles that its longest ones are begun early.
__device__ __forceinline__ Work locate_in_section(const Params& params, int blocks, int index) {
  const int owned = owned_count(params), last = (owned - params.last_section) / params.section;
  const int section = min_of(last, index / (params.section * blocks)), first = section * params.section;
  const int count = section == last ? owned - first : params.section, rest = index - first * blocks;
  return {rest / count, first + rest % count};
}
// Longest first within a section whose K and V the L2 holds at once.
__device__ __forceinline__ Work locate_section_rows(const Params& params, int m_blocks, int index) {
  const Work work = locate_in_section(params, m_blocks, index);
  return {m_blocks - 1 - work.block, work.owned};
}
__device__ __forceinline__ Work locate_keys(int n_blocks) {
  const int index = work_index();
  return {index % n_blocks, index / n_blocks};
}

struct BatchIndex {
  int i[3];
};

__device__ __forceinline__ BatchIndex unravel(int index, int extent1, int extent2) {
  return {{index / extent2 / extent1, index / extent2 % extent1, index % extent2}};
}

// The batch of grid position `owned` and loop position `summed`; of each axis one of the two is always 0.
__device__ __forceinline__ BatchIndex batch_index(const Params& params, int owned, int summed) {
  const BatchIndex g = unravel(owned, params.grid_extent1, params.grid_extent2),
                   l = unravel(summed, params.loop_extent1, params.loop_extent2);
  return {{g.i[0] + l.i[0], g.i[1] + l.i[1], g.i[2] + l.i[2]}};
}
__device__ __forceinline__ int loop_count(const Params& params) {
  return params.loop_extent0 * params.loop_extent1 * params.loop_extent2;
}
// Of all batch positions, in their order.
__device__ __forceinline__ i64 position_number(const Params& params, const BatchIndex& b) {
  const int extent1 = params.grid_extent1 * params.loop_extent1, extent2 = params.grid_extent2 * params.loop_extent2;
  return (i64(b.i[0]) * extent1 + b.i[1]) * extent2 + b.i[2];
}

__device__ __forceinline__ i64 offset(const Strides& s, BatchIndex b) {
  return b.i[0] * s.batch[0] + b.i[1] * s.batch[1] + b.i[2] * s.batch[2];
}

// Base of a batch in an array.
template <class T>
__device__ __forceinline__ const T* base(const void* x, const Strides& s, BatchIndex b) {
  return static_cast<const T*>(x) + offset(s, b);
}
template <class T>
__device__ __forceinline__ T* base(void* x, const Strides& s, BatchIndex b) {
  return static_cast<T*>(x) + offset(s, b);
}

}  // namespace cuflash
