// Accumulators to tiles in shared memory. The including kernel chose the family of pack(), which rounds two neighbours.
#pragma once
#include "fragment.cuh"
#include "shared.cuh"

namespace cuflash {

template <class T>
__device__ __forceinline__ void st_shared_pair(u32 at, Accumulator x, Accumulator y) {
  if constexpr (sizeof(T) == 2) {
    st_shared(at, pack<T>(x, y));
  } else {
    st_shared(at, x, y);
  }
}

// The warp's accumulators, rounded, to rows row0.. and columns col0.. of a tile.
template <int kMTiles, int kCols, class SharedT>
__device__ __forceinline__ void store_fragment(const Fragment<kMTiles, kCols>& f, SharedT& tile, int row0, int col0) {
  const u32 at = tile.address(row0 + lane_id() / 4, col0 + 2 * (lane_id() % 4));
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        st_shared_pair<typename SharedT::Element>(SharedT::advance(at, 16 * m + 8 * h, 8 * n), f.x[m][n][2 * h],
                                                  f.x[m][n][2 * h + 1]);
}

}  // namespace cuflash
