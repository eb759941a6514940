// Tiles of 16-bit elements in shared memory, swizzled so that ldmatrix and 16-byte rows are free of bank conflicts.
#pragma once
#include "common.cuh"

namespace cuflash {

constexpr int kChunk = 8;  // elements in 16 bytes: the unit that the swizzle moves

// Panels of 64 (or 32) columns, rows of 128 (or 64) bytes. Eight rows at one chunk column, which is what an ldmatrix
// phase reads, fall in eight different 16-byte bank groups.
template <int kRows, int kCols>
struct SharedTile {
  static constexpr int kPanel = kCols % 64 == 0 ? 64 : 32;
  static constexpr int kPanelChunks = kPanel / kChunk;
  static_assert(kCols % kPanel == 0, "a tile is whole panels");

  alignas(128) u16 data[kRows * kCols];

  // Address of 8 elements: row `row`, columns 8 * chunk and following.
  __device__ __forceinline__ u16* at(int row, int chunk) {
    const int panel = chunk / kPanelChunks, column = chunk % kPanelChunks;
    const int turn = kPanel == 64 ? row & 7 : (row >> 1) & 3;
    return data + panel * (kRows * kPanel) + row * kPanel + ((column ^ turn) * kChunk);
  }
  __device__ __forceinline__ const u16* at(int row, int chunk) const {
    return const_cast<SharedTile*>(this)->at(row, chunk);
  }
};

}  // namespace cuflash
