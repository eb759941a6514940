// What products need of shared memory where operands are used as they are.
#pragma once
#include "shared.cuh"

namespace cuflash {

struct PlainTiles {
  template <int kRows, int kCols>
  using TileA = SharedTile<Operand, kRows, kCols>;
  template <int kRows, int kCols>
  using TileB = SharedTile<Operand, kRows, kCols>;

  // Nothing to do between the landing of a tile and its use.
  template <int kThreads, class SharedT>
  static __device__ __forceinline__ void prepare(const SharedT&) {}
};

}  // namespace cuflash
