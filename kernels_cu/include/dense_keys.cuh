// Keys whose rows lie one after the other in global memory: a lane takes a unit, the fewest whose rows are whole
// vectors of 16 bytes.
#pragma once
#include "accumulator.cuh"
#include "key_vectors.cuh"

namespace cuflash {

// A unit's rows of K, or of V, as they came. What at() names is known when compiling.
struct DenseRows {
  static constexpr int kVectors =
      unit_keys(kTile.head_dim * int(sizeof(Operand)), 16) * kTile.head_dim * int(sizeof(Operand)) / 16;
  u32 x[kVectors][4];

  __device__ __forceinline__ void load(const Operand* gmem) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      asm volatile("ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                   : "l"(gmem + i * 16 / sizeof(Operand)));
  }
  __device__ __forceinline__ Accumulator at(int key, int feature) const {
    const int byte = (key * kTile.head_dim + feature) * int(sizeof(Operand)), word = byte / 4;
    return element_of<Operand>(x[word / 4][word % 4], x[word / 4][(word + 1) % 4], byte % 4 != 0);
  }
};

// The same of a single key.
struct OneRow {
  Accumulator x[kTile.head_dim];

  __device__ __forceinline__ explicit OneRow(const Operand* gmem) {
#pragma unroll
    for (int f = 0; f < kTile.head_dim; ++f) x[f] = to_float(gmem[f]);
  }
  __device__ __forceinline__ Accumulator at(int, int feature) const { return x[feature]; }
};

}  // namespace cuflash
