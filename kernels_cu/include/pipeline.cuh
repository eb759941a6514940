// Tiles from global to shared memory. The including kernel chose the family's copy().
#pragma once
#include "common.cuh"
#include "params.cuh"
#include "shared.cuh"

namespace cuflash {

// One chunk of which the first `valid` elements exist. `safe` is an address to name where nothing is read.
template <LoadKind kKind, class T>
__device__ __forceinline__ void copy_chunk(T* smem, const T* gmem, const T* safe, i64 col_stride, int valid) {
  if constexpr (kKind == LoadKind::kStrided && sizeof(T) == 2) {  // less than a copy can move
    u32 words[4] = {};
#pragma unroll
    for (int e = 0; e < kChunkOf<T>; ++e)
      if (e < valid) words[e / 2] |= u32(gmem[e * col_stride].bits) << (16 * (e % 2));
    *reinterpret_cast<uint4*>(smem) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    constexpr int kBytes = kKind == LoadKind::kStrided ? sizeof(T)
                           : kKind == LoadKind::k16    ? 16
                           : kKind == LoadKind::k8     ? 8
                                                       : 4;
    constexpr int kElements = kBytes / int(sizeof(T));
    if constexpr (kKind != LoadKind::kStrided) col_stride = 1;
#pragma unroll
    for (int e = 0; e < kChunkOf<T>; e += kElements) {
      const int bytes = max_of(0, min_of(kBytes, int(sizeof(T)) * (valid - e)));
      copy<kBytes>(smem + e, bytes > 0 ? gmem + e * col_stride : safe, bytes);
    }
  }
}

// f(offset in bytes) for each chunk of a tile that this thread copies: some lanes take the chunks of a panel and the
// CTA a band of rows at a time, so a thread keeps its columns and its swizzle.
template <int kThreads, class Tile, class F>
__device__ __forceinline__ void for_own_chunks(F f) {
  constexpr int kLanes = Tile::kPanelChunks, kRowStep = kThreads / kLanes;
  static_assert(kRowStep % 8 == 0, "the swizzle repeats every 8 rows");
  const int first_row = threadIdx.x / kLanes, chunk = threadIdx.x % kLanes;
  const int first = Tile::place(first_row) * Tile::kRowBytes + (chunk ^ Tile::turn(first_row)) * 16;
#pragma unroll
  for (int row = 0; row < Tile::kRowCount; row += kRowStep) {
    if (Tile::kRowCount % kRowStep != 0 && first_row + row >= Tile::kRowCount) break;
#pragma unroll
    for (int panel = 0; panel < Tile::kChunks / kLanes; ++panel)
      f(first + panel * Tile::kPanelBytes + row * Tile::kRowBytes);
  }
}

// A tile all of whose rows and columns exist, in vectors of 16 bytes: no sizes and one step.
template <int kThreads, class T, int kRows, int kCols>
__device__ __forceinline__ void load_whole_tile(SharedTile<T, kRows, kCols>& smem, const T* gmem, i64 row_stride) {
  using Tile = SharedTile<T, kRows, kCols>;
  constexpr int kLanes = Tile::kPanelChunks, kRowStep = kThreads / kLanes;
  const T* from = gmem + threadIdx.x / kLanes * row_stride + Tile::kChunk * (threadIdx.x % kLanes);
  constexpr int kPanels = Tile::kChunks / kLanes;
  int panel = 0;
  for_own_chunks<kThreads, Tile>([&](int offset) {
    copy<16>(reinterpret_cast<char*>(smem.data) + offset, from + panel * kLanes * Tile::kChunk);
    if (++panel == kPanels) panel = 0, from += kRowStep * row_stride;
  });
}

// Rows row0 and following of a (length, cols) array into the tile, zeros where the array ends: padding never reads
// memory, so what lies beyond the lengths cannot matter. All threads of the CTA take part.
template <LoadKind kKind, int kThreads, class T, int kRows, int kCols>
__device__ __forceinline__ void load_tile(SharedTile<T, kRows, kCols>& smem, const T* gmem, const Strides& stride,
                                          int row0, int length, int cols) {
  if constexpr (kKind == LoadKind::k16) {
    if (length - row0 >= kRows && cols == kCols)
      return load_whole_tile<kThreads>(smem, gmem + row0 * stride.row, stride.row);
  }
  // A few lanes take the chunks of a row and the CTA a band of rows at a time: a thread keeps its columns and its
  // swizzle, and steps one pointer. Not unrolled over chunks, nor over single elements: the compiler would hold an
  // address for each over the main loop, whose registers are all in use.
  constexpr int kChunk = kChunkOf<T>, kRowChunks = kCols / kChunk;
  constexpr int kLanes = kRowChunks % 8 == 0 ? 8 : 4, kRowStep = kThreads / kLanes;
  static_assert(kRowChunks % kLanes == 0 && kRowStep % 8 == 0, "the swizzle repeats every 8 rows");
  const int first_row = threadIdx.x / kLanes, rows = length - row0;
  gmem += row0 * stride.row;
#pragma unroll 1
  for (int chunk0 = 0; chunk0 < kRowChunks; chunk0 += kLanes) {
    const int chunk = chunk0 + threadIdx.x % kLanes, valid = max_of(0, min_of(kChunk, cols - kChunk * chunk));
    const T* from = gmem + first_row * stride.row + kChunk * chunk * stride.col;
#pragma unroll kKind == LoadKind::kStrided ? 1 : kCopyUnroll
    for (int step = 0; step < ceil_div(kRows, kRowStep); ++step, from += kRowStep * stride.row) {
      const int row = first_row + step * kRowStep;
      if (kRows % kRowStep != 0 && row >= kRows) break;
      copy_chunk<kKind>(smem.at(row, chunk), from, gmem, stride.col, row < rows ? valid : 0);
    }
  }
}

// kCount elements whose padding exists in memory (workspace row vectors).
template <int kThreads, int kCount>
__device__ __forceinline__ void load_row_vector(Accumulator* smem, const Accumulator* gmem) {
  constexpr int kChunk = kChunkOf<Accumulator>;
  static_assert(kCount % kChunk == 0 && kCount / kChunk <= kThreads, "one 16-byte copy a thread");
  if (threadIdx.x < kCount / kChunk) copy<16>(smem + kChunk * threadIdx.x, gmem + kChunk * threadIdx.x, 16);
}

}  // namespace cuflash
