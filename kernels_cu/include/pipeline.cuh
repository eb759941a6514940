// Tiles from global to shared memory. The including kernel chose the family's copy().
#pragma once
#include "common.cuh"
#include "params.cuh"
#include "shared.cuh"

namespace cuflash {

// One chunk of which the first `valid` elements exist. `safe` is an address to name where nothing is read.
template <LoadKind kKind>
__device__ __forceinline__ void copy_chunk(u16* smem, const u16* gmem, const u16* safe, i64 col_stride, int valid) {
  if constexpr (kKind == LoadKind::kStrided) {
    u32 words[kChunk / 2] = {};
#pragma unroll
    for (int e = 0; e < kChunk; ++e)
      if (e < valid) words[e / 2] |= u32(gmem[e * col_stride]) << (16 * (e % 2));
    *reinterpret_cast<uint4*>(smem) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    constexpr int kBytes = kKind == LoadKind::k16 ? 16 : kKind == LoadKind::k8 ? 8 : 4;
#pragma unroll
    for (int e = 0; e < kChunk; e += kBytes / 2) {
      const int bytes = max_of(0, min_of(kBytes, 2 * (valid - e)));
      copy<kBytes>(smem + e, bytes > 0 ? gmem + e : safe, bytes);
    }
  }
}

// Rows row0 and following of a (length, cols) array into the tile, zeros where the array ends: padding never reads
// memory, so what lies beyond the lengths cannot matter. All threads of the CTA take part.
template <LoadKind kKind, int kThreads, int kRows, int kCols>
__device__ __forceinline__ void load_tile(SharedTile<kRows, kCols>& smem, const u16* gmem, const Strides& stride,
                                          int row0, int length, int cols) {
  // A few lanes take the chunks of a row and the CTA a band of rows at a time: a thread keeps its columns and its
  // swizzle, and steps one pointer. Not unrolled over chunks, nor over single elements: the compiler would hold an
  // address for each over the main loop, whose registers are all in use.
  constexpr int kRowChunks = kCols / kChunk, kLanes = kRowChunks % 8 == 0 ? 8 : 4, kRowStep = kThreads / kLanes;
  static_assert(kRowChunks % kLanes == 0 && kRowStep % 8 == 0, "the swizzle repeats every 8 rows");
  const int first_row = threadIdx.x / kLanes, rows = length - row0;
  gmem += row0 * stride.row;
#pragma unroll 1
  for (int chunk0 = 0; chunk0 < kRowChunks; chunk0 += kLanes) {
    const int chunk = chunk0 + threadIdx.x % kLanes, valid = max_of(0, min_of(kChunk, cols - kChunk * chunk));
    const u16* from = gmem + first_row * stride.row + kChunk * chunk * stride.col;
#pragma unroll kKind == LoadKind::kStrided ? 1 : kCopyUnroll
    for (int step = 0; step < ceil_div(kRows, kRowStep); ++step, from += kRowStep * stride.row) {
      const int row = first_row + step * kRowStep;
      if (kRows % kRowStep != 0 && row >= kRows) break;
      copy_chunk<kKind>(smem.at(row, chunk), from, gmem, stride.col, row < rows ? valid : 0);
    }
  }
}

// kCount floats whose padding exists in memory (workspace row vectors).
template <int kThreads, int kCount>
__device__ __forceinline__ void load_row_vector(float* smem, const float* gmem) {
  static_assert(kCount % 4 == 0 && kCount / 4 <= kThreads, "one 16-byte copy a thread");
  if (threadIdx.x < kCount / 4) copy<16>(smem + 4 * threadIdx.x, gmem + 4 * threadIdx.x, 16);
}

}  // namespace cuflash
