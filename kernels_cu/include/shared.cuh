// Tiles in shared memory, swizzled so that every access of fragments and 16-byte rows is free of bank conflicts.
#pragma once
#include "ptx/shared.cuh"

namespace cuflash {

// Elements in 16 bytes: the unit that the swizzle moves.
template <class T>
constexpr int kChunkOf = 16 / int(sizeof(T));

// Panels of 8 (or 4) chunks, rows of 128 (or 64) bytes. Eight rows at one chunk column, which is what an ldmatrix
// phase reads, fall in eight different 16-byte bank groups.
template <class T, int kRows, int kCols>
struct SharedTile {
  using Element = T;
  static constexpr int kChunk = kChunkOf<T>, kChunks = kCols / kChunk;
  static constexpr int kPanelChunks = kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kRowCount = kRows, kRowBytes = 16 * kPanelChunks, kPanelBytes = kRows * kRowBytes;
  static_assert(kChunks % kPanelChunks == 0, "a tile is whole panels");

  alignas(128) T data[kRows * kCols];

  // Which way a row permutes the chunks of its panel. 8-byte elements have no ldmatrix: a quarter of a warp reads two
  // rows at four successive chunks, which bit 2 keeps apart, or half a warp four even rows at two chunks.
  static __device__ __forceinline__ int turn(int row) {
    if constexpr (kPanelChunks == 4 && sizeof(T) == 8) return row >> 1 & 2;
    if constexpr (kPanelChunks == 4) return (row >> 1) & 3;
    if constexpr (sizeof(T) == 8) return (row & 7) ^ ((row & 1) << 2);
    return row & 7;
  }

  // Where a row lies. Of 8-byte elements, four even rows of 64 bytes are to take turns with the odd ones for the first
  // half of 128 bytes.
  static __device__ __forceinline__ int place(int row) {
    return kPanelChunks == 4 && sizeof(T) == 8 ? row ^ (row >> 1 & 1) : row;
  }

  // The elements of a chunk: row `row`, columns kChunk * chunk and following.
  __device__ __forceinline__ T* at(int row, int chunk) {
    return data + chunk / kPanelChunks * (kPanelBytes / int(sizeof(T))) + place(row) * (kRowBytes / int(sizeof(T))) +
           ((chunk % kPanelChunks ^ turn(row)) * kChunk);
  }
  __device__ __forceinline__ const T* at(int row, int chunk) const {
    return const_cast<SharedTile*>(this)->at(row, chunk);
  }

  // Shared address of element (row, col).
  __device__ __forceinline__ u32 address(int row, int col) const {
    const int chunk = col / kChunk;
    return shared_address(data) + chunk / kPanelChunks * kPanelBytes + place(row) * kRowBytes +
           (chunk % kPanelChunks ^ turn(row)) * 16 + col % kChunk * int(sizeof(T));
  }
  // From the address of (row, col), which depends on lane and warp, to that of (row + rows, col + cols), which are
  // known: one xor and an immediate. `rows` is a multiple of 8, `cols` of a chunk, and in a panel cols adds to col
  // without a carry. A tile starts at a multiple of 128 bytes, so the xor stays inside a row.
  static __device__ __forceinline__ u32 advance(u32 address, int rows, int cols) {
    const int chunk = cols / kChunk;
    return (address ^ chunk % kPanelChunks * 16) + chunk / kPanelChunks * kPanelBytes + rows * kRowBytes;
  }
};

// Two elements that lie side by side.
template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T x, y;
};

}  // namespace cuflash
