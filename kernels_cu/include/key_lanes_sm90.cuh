// How lanes share out a raw tile of keys: each reads its own in whole vectors, without bank conflicts, and takes them
// apart and converts them in registers.
#pragma once
#include "key_tile_sm90.cuh"
#include "key_vectors.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// A lane's keys of a step fill kFeatures vectors. A unit is the fewest keys that fill whole ones; units of a step go
// over the lanes in turn.
constexpr int kLaneKeys = 16 / int(sizeof(Accumulator)), kStepKeys = 32 * kLaneKeys;
constexpr int kVectorBytes = kLaneKeys * int(sizeof(Operand));
constexpr int kUnitKeys = unit_keys(kKeyBytes, kVectorBytes), kUnitBytes = kUnitKeys * kKeyBytes;
constexpr int kUnitVectors = kUnitBytes / kVectorBytes;
constexpr int kStepBytes = kStepKeys * kKeyBytes, kStepBias = kStepKeys * int(sizeof(Accumulator));

// From a lane's first key to its i-th.
constexpr int key_offset(int i) { return i / kUnitKeys * 32 * kUnitKeys + i % kUnitKeys; }

// Where this lane's keys of a step are, and their biases.
__device__ __forceinline__ u32 lane_address(const KeyTile& tile, int step) {
  return shared_address(&tile) + step * kStepBytes + lane_id() * kUnitBytes;
}
__device__ __forceinline__ u32 lane_bias_address(const KeyTile& tile, int step) {
  return shared_address(&tile) + KeyTile::kBias + step * kStepBias + lane_id() * kUnitKeys * int(sizeof(Accumulator));
}

// This lane's rows of K, or of V, of a step.
struct LaneRows {
  u32 x[kFeatures][kVectorBytes / 4];

  __device__ __forceinline__ explicit LaneRows(u32 at) { load(at); }
  __device__ __forceinline__ void load(u32 at) {
#pragma unroll
    for (int i = 0; i < kFeatures; ++i)
      ld_shared(x[i], at + i / kUnitVectors * 32 * kUnitBytes + i % kUnitVectors * kVectorBytes);
  }
  __device__ __forceinline__ Accumulator at(int key, int feature) const {
    const int byte = key % kUnitKeys * kKeyBytes + feature * int(sizeof(Operand));
    const int vector = key / kUnitKeys * kUnitVectors + byte / kVectorBytes, word = byte % kVectorBytes / 4;
    constexpr int kWords = kVectorBytes / 4;
    return element_of<Operand>(x[vector][word], x[vector][(word + 1) % kWords], byte % 4 != 0);
  }
};

__device__ __forceinline__ Accumulator lane_bias(u32 bias_at, int key) {
  Accumulator bias;
  ld_shared(bias, bias_at + key_offset(key) * int(sizeof(Accumulator)));
  return bias;
}

}  // namespace cuflash
