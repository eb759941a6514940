// Keys whose rows lie one after the other, in vectors that hold parts of several rows: what a lane takes is whole
// vectors of whole rows, taken apart in registers.
#pragma once
#include "common.cuh"
#include "ptx/convert.cuh"

namespace cuflash {

// The fewest keys whose rows fill whole vectors.
constexpr int unit_keys(int key_bytes, int vector_bytes) {
  int keys = 1;
  while (keys * key_bytes % vector_bytes != 0) keys *= 2;
  return keys;
}

// An element that begins in word x, in its upper half where `odd`; y is the word after it.
template <class T>
__device__ __forceinline__ Accumulator element_of(u32 x, u32 y, bool odd) {
  if constexpr (sizeof(T) == 2) return to_float(T{u16(odd ? x >> 16 : x)});
  if constexpr (sizeof(T) == 4) return __uint_as_float(x);
  if constexpr (sizeof(T) == 8) return __hiloint2double(int(y), int(x));
}

}  // namespace cuflash
