// A row that its CTA keeps in shared memory, as it came: one load, and it can be gone over again and again. Each thread
// reads what it has written itself, so nothing waits.
#pragma once
#include "lineage/rows.cuh"

namespace cuflash {

struct WholeRow {
  Elements* chunks;  // of the whole row
  int length, lane, lanes;

  // f(chunk, index of its first element) for this thread's chunks.
  template <class F>
  __device__ __forceinline__ void for_each(F f) const {
#pragma unroll 4
    for (int c = lane; c < length / kElements; c += lanes) f(chunks[c], c * kElements);
  }

  __device__ __forceinline__ void load(const Operand* x) const {
    for_each([&](Elements& chunk, int i) { chunk = *reinterpret_cast<const Elements*>(x + i); });
  }
};

// The row of this CTA, and room for `which` whole rows before that of the one returned.
__device__ __forceinline__ WholeRow whole_row(const Row& row, char* smem, int which) {
  return {reinterpret_cast<Elements*>(smem) + which * (row.length / kElements), int(row.length), row.lane, row.lanes};
}

}  // namespace cuflash
