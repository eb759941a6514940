// What every kernel file knows: element types, the tile, and compile-time helpers. Header-free on purpose: NVRTC alone.
#pragma once

namespace cuflash {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct Half {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <bool kFlag, class A, class B>
struct Conditional {
  using type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using type = B;
};
template <bool kFlag, class A, class B>
using ConditionalType = typename Conditional<kFlag, A, B>::type;

// A compile-time choice handed to a lambda.
template <bool kFlag>
struct Flag {
  static constexpr bool value = kFlag;
  __device__ constexpr operator bool() const { return kFlag; }
};

struct Tile {
  int head_dim, value_dim;  // buckets: the caller's dims are at most these
  int block_m, block_n;     // query rows and keys of a block
  int stages, warps;
  int column_warps;  // warps that share a row of scores between them
  int low_bits;      // float32 tiles kept with their low bits: 1 those read row by row, 2 the forward's V, too
  int resident;      // CTAs that an SM is to hold: registers are shared out for so many
  int q_stages;      // of sm_90: buffers of Q
};

// How operands come from global memory: vectors of so many bytes, or single elements at any stride.
enum class LoadKind { k16, k8, k4, kStrided };

constexpr int kRowPadding = 128;  // row vectors of the workspace are padded to this many rows, so that tiles load whole
constexpr u32 kFullWarp = 0xffffffffu;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float pos_inf() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7fffffff); }

template <class T>
__host__ __device__ constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
__host__ __device__ constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}
__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int power_of_two_from(int x) { return x <= 1 ? 1 : 2 * power_of_two_from((x + 1) / 2); }

}  // namespace cuflash
