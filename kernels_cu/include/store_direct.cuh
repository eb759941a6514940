// Results of one warp from its registers straight to global memory. A quad of lanes holds a row between them and
// exchanges 16-bit elements, so that each of them has whole vectors.
#pragma once
#include "fragment.cuh"
#include "params.cuh"

namespace cuflash {

// Part c of vectors 0 to 3, in lane c of a quad, to parts 0 to 3 of vector c.
__device__ __forceinline__ void transpose_quad(u32 (&x)[4]) {
  const bool odd = lane_id() & 1, upper = lane_id() & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 other = __shfl_xor_sync(kFullWarp, odd ? x[i] : x[i + 1], 1);
    if (odd) {
      x[i] = other;
    } else {
      x[i + 1] = other;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 other = __shfl_xor_sync(kFullWarp, upper ? x[i] : x[i + 2], 2);
    if (upper) {
      x[i] = other;
    } else {
      x[i + 2] = other;
    }
  }
}

// Rounds the warp's accumulators and writes them to rows row0.. of a (length, cols) array, by vectors of 16 bytes where
// they may be (`vector`).
template <class T, int kCols>
__device__ __forceinline__ void store_rows_direct(const Fragment<1, kCols>& f, T* gmem, const Strides& stride, int row0,
                                                  int length, int cols, bool vector) {
  static_assert(kCols % 32 == 0, "a quad has a vector of each of four tiles");
  const auto store = [&](T* row, bool exists, int col, Accumulator x) {
    if (exists && col < cols) row[col * stride.col] = from_float<T>(x);
  };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + lane_id() / 4 + 8 * h, lane = lane_id() % 4;
    T* to = gmem + i64(row) * stride.row;
    const bool exists = row < length;
    if (!vector) {
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) store(to, exists, 8 * n + 2 * lane + j, f.x[0][n][2 * h + j]);
      continue;
    }
#pragma unroll
    for (int group = 0; group < kCols; group += 32) {
      if constexpr (sizeof(T) == 2) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = pack<T>(f.x[0][group / 8 + i][2 * h], f.x[0][group / 8 + i][2 * h + 1]);
        transpose_quad(x);
        const int col = group + 8 * lane;
        if (exists && col + 8 <= cols) {
          *reinterpret_cast<uint4*>(to + col) = make_uint4(x[0], x[1], x[2], x[3]);
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e)
            if (exists && col + e < cols) to[col + e] = T{u16(e % 2 ? x[e / 2] >> 16 : x[e / 2])};
        }
      } else {
#pragma unroll
        for (int n = group / 8; n < group / 8 + 4; ++n) {  // the quad has a sector of each tile
          const int col = 8 * n + 2 * lane;
          if (exists && col + 2 <= cols) {
            *reinterpret_cast<float2*>(to + col) = make_float2(f.x[0][n][2 * h], f.x[0][n][2 * h + 1]);
          } else {
            store(to, exists, col, f.x[0][n][2 * h]);
          }
        }
      }
    }
  }
}

}  // namespace cuflash
