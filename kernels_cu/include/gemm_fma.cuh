// Products of one warp over floats or doubles without tensor cores: the same accumulators, by ordinary FMAs.
#pragma once
#include "fragment.cuh"
#include "plain_tiles.cuh"

namespace cuflash {

struct GemmFma : PlainTiles, AccumulatorOperand {
  static constexpr int kChunk = kChunkOf<Operand>;

  // acc += A B^T: A rows row0.. of a tile (rows, k), B rows col0.. of a tile (cols, k).
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void nt(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
#pragma unroll 1
    for (int chunk = 0; chunk < kDepth / kChunk; ++chunk) {
      Operand a[2 * kMTiles][kChunk];
#pragma unroll
      for (int r = 0; r < 2 * kMTiles; ++r) load_chunk(a[r], a_smem.at(row0 + 8 * r + lane_id() / 4, chunk));
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          Operand b[kChunk];
          load_chunk(b, b_smem.at(col0 + 8 * n + 2 * (lane_id() % 4) + j, chunk));
#pragma unroll
          for (int r = 0; r < 2 * kMTiles; ++r)
#pragma unroll
            for (int e = 0; e < kChunk; ++e) {
              Operand& sum = acc.x[r / 2][n][2 * (r % 2) + j];
              sum = fma(a[r][e], b[e], sum);
            }
        }
    }
  }

  // acc += A B: A in registers (rows, k), B columns col0.. of a tile (k, cols). Lanes of a quad pass A to each other.
  template <int kDepth, int kMTiles, int kCols, class SharedB>
  static __device__ __forceinline__ void nn(Fragment<kMTiles, kCols>& acc, const OperandA<kMTiles, kDepth>& a_rmem,
                                            const SharedB& b_smem, int col0) {
#pragma unroll
    for (int tile = 0; tile < kDepth / 8; ++tile)
#pragma unroll 1
      for (int owner = 0; owner < 4; ++owner)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          Operand a[2 * kMTiles];
#pragma unroll
          for (int r = 0; r < 2 * kMTiles; ++r)
            a[r] = __shfl_sync(kFullWarp, a_rmem.x[r / 2][tile][2 * (r % 2) + j], owner, 4);
          step_nn(acc, a, b_smem, 8 * tile + 2 * owner + j, col0);
        }
  }

  // acc += A B: A rows row0.. of a tile (rows, k), B columns col0.. of a tile (k, cols).
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void nn(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
#pragma unroll 2
    for (int k = 0; k < kDepth; ++k) {
      Operand a[2 * kMTiles];
#pragma unroll
      for (int r = 0; r < 2 * kMTiles; ++r) a[r] = a_smem.at(row0 + 8 * r + lane_id() / 4, k / kChunk)[k % kChunk];
      step_nn(acc, a, b_smem, k, col0);
    }
  }

  // acc += A^T B: A columns row0.. of a tile (k, rows), B columns col0.. of a tile (k, cols).
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void tn(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
#pragma unroll 2
    for (int k = 0; k < kDepth; ++k) {
      Operand a[2 * kMTiles];
#pragma unroll
      for (int r = 0; r < 2 * kMTiles; ++r) {
        const int row = row0 + 8 * r + lane_id() / 4;
        a[r] = a_smem.at(k, row / kChunk)[row % kChunk];
      }
      step_nn(acc, a, b_smem, k, col0);
    }
  }

 private:
  static __device__ __forceinline__ void load_chunk(Operand (&to)[kChunk], const Operand* from) {
    struct alignas(16) Chunk {
      Operand x[kChunk];
    };
    const Chunk chunk = *reinterpret_cast<const Chunk*>(from);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) to[e] = chunk.x[e];
  }

  template <int kMTiles, int kCols, class SharedB>
  static __device__ __forceinline__ void step_nn(Fragment<kMTiles, kCols>& acc, const Operand (&a)[2 * kMTiles],
                                                 const SharedB& b_smem, int k, int col0) {
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      const int col = col0 + 8 * n + 2 * (lane_id() % 4);
      const auto b = *reinterpret_cast<const Pair<Operand>*>(b_smem.at(k, col / kChunk) + col % kChunk);
#pragma unroll
      for (int r = 0; r < 2 * kMTiles; ++r) {
        Operand(&sum)[4] = acc.x[r / 2][n];
        sum[2 * (r % 2)] = fma(a[r], b.x, sum[2 * (r % 2)]);
        sum[2 * (r % 2) + 1] = fma(a[r], b.y, sum[2 * (r % 2) + 1]);
      }
    }
  }
};

}  // namespace cuflash
