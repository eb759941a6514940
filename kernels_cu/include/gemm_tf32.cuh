// Products of one warp over floats on tensor cores, which take the leading 11 bits of a float (TF32) and ignore the
// rest.
//
// Three products of split operands give float32's accuracy: x = hi + lo, a b = hi hi + hi lo + lo hi, and what is left
// out is at most 1.5 * 2^-20 of the product, a quarter of that in the mean. hi is x itself; lo, what the tensor core
// ignores of it, is made on the way to the product, or once for all warps where B comes row by row (nt). With one
// product (precision='tf32') operands are rounded to 11 bits, on the way too, or once in a RoundedTile. Tensor cores
// truncate as they accumulate, so where there are three products sums stay in them for a few steps only: products go to
// fresh accumulators, which ordinary additions join to earlier sums. With one product they stay, as in 16 bits.
#pragma once
#include "fragment.cuh"
#include "pipeline.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "shared.cuh"

namespace cuflash {

// What a tensor core ignores of x, rounded to what it takes of that. Nothing is left of an infinity, nor of numbers of
// 11 bits; as 0 times infinity is NaN, sums that should be infinite may be NaN.
__device__ __forceinline__ u32 low_bits(u32 x) {
  const float rest = __uint_as_float(x) - __uint_as_float(x & 0xffffe000u);
  return __float_as_uint(rest) + 0x1000u;
}

// A tile that is B of products row by row, with the low bits of its elements.
template <int kRows, int kCols>
struct SplitTile {
  SharedTile<float, kRows, kCols> x, low;

  __device__ __forceinline__ u32 address(int row, int col) const { return x.address(row, col); }
  static __device__ __forceinline__ u32 advance(u32 address, int rows, int cols) {
    return SharedTile<float, kRows, kCols>::advance(address, rows, cols);
  }
};

template <LoadKind kKind, int kThreads, int kRows, int kCols>
__device__ __forceinline__ void load_tile(SplitTile<kRows, kCols>& smem, const float* gmem, const Strides& stride,
                                          int row0, int length, int cols) {
  load_tile<kKind, kThreads>(smem.x, gmem, stride, row0, length, cols);
}

// A tile whose elements are rounded, in place, once they have landed.
template <int kRows, int kCols>
struct RoundedTile : SharedTile<float, kRows, kCols> {};

struct GemmTf32 : AccumulatorOperand {
  // A tile that is A of products again and again.
  template <int kRows, int kCols>
  using TileA = ConditionalType<kTf32, RoundedTile<kRows, kCols>, SharedTile<float, kRows, kCols>>;
  template <int kRows, int kCols>
  using TileB = ConditionalType<kTile.low_bits && !kTf32, SplitTile<kRows, kCols>, SharedTile<float, kRows, kCols>>;

  // Rounded here, once for all column tiles.
  template <int kMTiles, int kDepth>
  static __device__ __forceinline__ void to_operand(OperandA<kMTiles, kDepth>& a, const Fragment<kMTiles, kDepth>& f) {
    a = f;
    if constexpr (kTf32) a.for_each([](float& x, int, int, int) { x = __uint_as_float(to_tf32(__float_as_uint(x))); });
  }

  // Once this thread's copies have landed: the low bits of the elements that it copied, before others read the tile.
  template <int kThreads, int kRows, int kCols>
  static __device__ __forceinline__ void prepare(SplitTile<kRows, kCols>& tile) {
    using Half = SharedTile<float, kRows, kCols>;
    for_own_chunks<kThreads, Half>([&](int offset) {
      const u32 at = shared_address(tile.x.data) + offset;
      u32 x[4];
      ld_shared(x, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = low_bits(x[i]);
      st_shared(at + int(sizeof(Half)), x);
    });
  }
  template <int kThreads, int kRows, int kCols>
  static __device__ __forceinline__ void prepare(RoundedTile<kRows, kCols>& tile) {
    for_own_chunks<kThreads, SharedTile<float, kRows, kCols>>([&](int offset) {
      const u32 at = shared_address(tile.data) + offset;
      u32 x[4];
      ld_shared(x, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = to_tf32(x[i]);
      st_shared(at, x);
    });
  }
  template <int kThreads, int kRows, int kCols>
  static __device__ __forceinline__ void prepare(SharedTile<float, kRows, kCols>&) {}

  // acc += A B^T: A rows row0.. of a tile (rows, k), B rows col0.. of a tile (cols, k). ldmatrix moves pairs of 16-bit
  // elements, which may as well be floats.
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void nt(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
    const u32 a_at = a_smem.address(row0 + lane_id() % 16, lane_id() / 16 * 4);
    const u32 b_at = b_smem.address(col0 + lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2 * 4);
    static_assert(kCols % 16 == 0, "ldmatrix brings 16 rows of B");
    Fragment<kMTiles, kCols> small;
    small.clear();
#pragma unroll
    for (int k0 = 0; k0 < kDepth / 8; k0 += kChain) {
      Fragment<kMTiles, kCols> fresh;
      fresh.clear();
      Fragment<kMTiles, kCols>& large = kTf32 ? acc : fresh;
#pragma unroll kUnroll
      for (int k = k0; k < min_of(k0 + kChain, kDepth / 8); ++k) {
        Split<4> a[kMTiles];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          ldmatrix_x4(a[m].hi, SharedA::advance(a_at, 16 * m, 8 * k));
          if constexpr (!kIsRounded<SharedA>) a[m].split();
        }
#pragma unroll
        for (int n = 0; n < kCols / 16; ++n) {
          const u32 at = SharedB::advance(b_at, 16 * n, 8 * k);
          Split<4> b;
          ldmatrix_x4(b.hi, at);
          if constexpr (kHasLow<SharedB>) {
            ldmatrix_x4(b.lo, at + int(sizeof(SharedB)) / 2);
          } else {
            b.split();
          }
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int m = 0; m < kMTiles; ++m)
              step(large.x[m][2 * n + j], small.x[m][2 * n + j], a[m], b.hi[2 * j], b.hi[2 * j + 1], b.lo[2 * j],
                   b.lo[2 * j + 1]);
        }
      }
      if constexpr (!kTf32) acc.for_each_with(fresh, [](float& sum, float& more, int, int, int) { sum += more; });
    }
    if constexpr (!kTf32) acc.for_each_with(small, [](float& sum, float& more, int, int, int) { sum += more; });
  }

  // acc += A B: A in registers (rows, k), B columns col0.. of a tile (k, cols).
  template <int kDepth, int kMTiles, int kCols, class SharedB>
  static __device__ __forceinline__ void nn(Fragment<kMTiles, kCols>& acc, const OperandA<kMTiles, kDepth>& a_rmem,
                                            const SharedB& b_smem, int col0) {
    // Slots t and t + 4 of a k step (t = lane % 4) are columns 2t and 2t + 1 of an accumulator.
    product<kDepth>(acc, b_smem, col0, [&](Split<4>& a, int m, int k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a.hi[i] = __float_as_uint(a_rmem.x[m][k][2 * (i % 2) + i / 2]);
      if constexpr (!kTf32) a.split();  // to_operand has rounded
    });
  }
  // The same, A rows row0.. of a tile (rows, k).
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void nn(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
    const u32 a_at = a_smem.address(row0 + lane_id() / 4, 2 * (lane_id() % 4));
    product<kDepth>(acc, b_smem, col0, [&](Split<4>& a, int m, int k) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 pair[2];
        ld_shared(pair, SharedA::advance(a_at, 16 * m + 8 * h, 8 * k));
        a.hi[h] = pair[0];
        a.hi[2 + h] = pair[1];
      }
      a.split();
    });
  }
  // acc += A^T B: A columns row0.. of a tile (k, rows).
  template <int kDepth, int kMTiles, int kCols, class SharedA, class SharedB>
  static __device__ __forceinline__ void tn(Fragment<kMTiles, kCols>& acc, const SharedA& a_smem, int row0,
                                            const SharedB& b_smem, int col0) {
    const u32 a_at[2] = {a_smem.address(2 * (lane_id() % 4), row0 + lane_id() / 4),
                         a_smem.address(2 * (lane_id() % 4) + 1, row0 + lane_id() / 4)};
    product<kDepth>(acc, b_smem, col0, [&](Split<4>& a, int m, int k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ld_shared(a.hi[i], SharedA::advance(a_at[i / 2], 8 * k, 16 * m + 8 * (i % 2)));
      a.split();
    });
  }

 private:
  // More than a few k steps in one piece, and the compiler runs out of registers for what it loads ahead.
  static constexpr int kUnroll = kTf32 ? 8 : 4;
  // Where there are three products: steps of a chain of large ones in nt, and of a chain of all in product().
  static constexpr int kChain = 8, kShortChain = 4;

  template <class SharedT>
  static constexpr bool kIsRounded = false;
  template <int kRows, int kCols>
  static constexpr bool kIsRounded<RoundedTile<kRows, kCols>> = true;
  template <class SharedT>
  static constexpr bool kHasLow = false;
  template <int kRows, int kCols>
  static constexpr bool kHasLow<SplitTile<kRows, kCols>> = true;

  // Registers of an operand.
  template <int kCount>
  struct Split {
    u32 hi[kCount], lo[kCount];
    // From x in hi.
    __device__ __forceinline__ void split() {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if constexpr (kTf32) {
          hi[i] = to_tf32(hi[i]);
        } else {
          lo[i] = low_bits(hi[i]);
        }
      }
    }
  };

  static __device__ __forceinline__ void step(float (&large)[4], float (&small)[4], const Split<4>& a, u32 b0, u32 b1,
                                              u32 b0_low, u32 b1_low) {
    if constexpr (!kTf32) {
      mma_m16n8k8(small, a.lo, {b0, b1});
      mma_m16n8k8(small, a.hi, {b0_low, b1_low});
    }
    mma_m16n8k8(large, a.hi, {b0, b1});
  }

  // acc += A B, some of the column tiles and of the k steps at a time; load_a gives A of an m tile and k step, ready
  // for step(). One chain for all three products: it is short, and registers are few.
  template <int kDepth, int kMTiles, int kCols, class LoadA, class SharedB>
  static __device__ __forceinline__ void product(Fragment<kMTiles, kCols>& acc, const SharedB& b_smem, int col0,
                                                 LoadA load_a) {
    constexpr int kTiles = kCols / 8, kMost = (kTf32 ? 8 : 16) / kMTiles;
    constexpr int kGroup = kTiles % kMost == 0 ? kMost : kTiles % 2 == 0 ? 2 : 1;
    const u32 b_at[2] = {b_smem.address(2 * (lane_id() % 4), col0 + lane_id() / 4),
                         b_smem.address(2 * (lane_id() % 4) + 1, col0 + lane_id() / 4)};
#pragma unroll
    for (int n0 = 0; n0 < kTiles; n0 += kGroup)
#pragma unroll
      for (int k0 = 0; k0 < kDepth / 8; k0 += kShortChain) {
        Fragment<kMTiles, 8 * kGroup> fresh;
        fresh.clear();
        const auto sums = [&](int m, int n) -> float(&)[4] { return kTf32 ? acc.x[m][n0 + n] : fresh.x[m][n]; };
#pragma unroll
        for (int k = k0; k < min_of(k0 + kShortChain, kDepth / 8); ++k) {
          Split<4> a[kMTiles];
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) load_a(a[m], m, k);
#pragma unroll
          for (int n = 0; n < kGroup; ++n) {
            Split<2> b;
#pragma unroll
            for (int s = 0; s < 2; ++s) {
              const u32 at = SharedB::advance(b_at[s], 8 * k, 8 * (n0 + n));
              ld_shared(b.hi[s], at);
              if constexpr (kHasLow<SharedB>) ld_shared(b.lo[s], at + int(sizeof(SharedB)) / 2);
            }
            if constexpr (!kHasLow<SharedB>) b.split();
#pragma unroll
            for (int m = 0; m < kMTiles; ++m)
              step(sums(m, n), sums(m, n), a[m], b.hi[0], b.hi[1], b.lo[0], b.lo[1]);
          }
        }
        if constexpr (kTf32) continue;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
          for (int n = 0; n < kGroup; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc.x[m][n0 + n][i] += fresh.x[m][n][i];
      }
  }
};

}  // namespace cuflash
