// 2^x in float64 with a table in shared memory, for kernels whose time exponentials are. After exp2.cuh, with a table
// of 256: |r| <= 1/512 takes two FP64 instructions less than 1/64, and a load and two integer instructions take the
// place of two shuffles.
//
// Each entry stands there 16 times, side by side: a lane reads its own copy, and no two lanes of a half warp, which is
// what one pass of 8-byte loads serves, meet in a bank.
// Within 1.5 ulp: entries are results of ex2_near.
#pragma once
#include "common.cuh"
#include "exp2.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

constexpr int kSharedRoots = 256, kRootShift = 20 - 8;  // from n to where whole octaves count in a high word
constexpr double kSharedRound = 0x1.8p+44;              // as kExp2Round, to a multiple of 1/256

// As kExp2Coefficients, on [-1/512, 1/512]: within 2^-58.
__constant__ double kSharedCoefficients[4] = {0x1.62e42fefa39b9p-1, 0x1.ebfbdff82c3e9p-3, 0x1.c6b090da1e780p-5,
                                              0x1.3b2acp-7};

struct Exp2Roots {
  static constexpr int kCopies = 16;
  double root[kSharedRoots][kCopies];  // without what n << kRootShift brings to the exponent field

  // By kThreads threads, whole warps; a barrier follows before entries are read.
  template <int kThreads>
  __device__ __forceinline__ void fill() {
    const Exp2Table table(threadIdx.x % 32);
    for (int i = threadIdx.x; i < kSharedRoots; i += kThreads) {
      const double x = ex2_near(i * (1. / kSharedRoots), table);
      const double entry = __hiloint2double(__double2hiint(x) - (i << kRootShift), __double2loint(x));
#pragma unroll 1
      for (int copy = 0; copy < kCopies; ++copy) root[i][(copy + threadIdx.x) % kCopies] = entry;
    }
  }
};

// What a lane knows of the table.
struct SharedExp2Table {
  u32 at;  // of its copy of the first entry

  SharedExp2Table() = default;
  __device__ __forceinline__ explicit SharedExp2Table(const Exp2Roots& roots)
      : at(shared_address(&roots.root[0][threadIdx.x % Exp2Roots::kCopies])) {}
};

// 2^(n/256 + r) = scale * (1 + tail), n in the low word of `rounded`.
__device__ __forceinline__ void ex2_parts(double rounded, double r, const SharedExp2Table& table, double& scale,
                                          double& tail) {
  constexpr int kPitch = sizeof(Exp2Roots::root[0]);
  const int n = __double2loint(rounded);
  double root;
  ld_shared_constant(root, table.at + u32(n) % kSharedRoots * kPitch);
  scale = __hiloint2double(__double2hiint(root) + (n << kRootShift), __double2loint(root));
  tail = kSharedCoefficients[3];
#pragma unroll
  for (int i = 2; i >= 0; --i) tail = fma(tail, r, kSharedCoefficients[i]);
  tail = __dmul_rn(tail, r);
}
__device__ __forceinline__ void ex2_split(double x, const SharedExp2Table& table, double& scale, double& tail) {
  const double rounded = __dadd_rn(x, kSharedRound);
  ex2_parts(rounded, __dsub_rn(x, __dsub_rn(rounded, kSharedRound)), table, scale, tail);
}

// 2^(x c - mc), start = kSharedRound - mc where mc is a multiple of 1/256 below 2^42 and the exponent near. The product
// is not rounded: it goes into n and, once n is known, into r.
__device__ __forceinline__ double ex2_near(double x, double c, double start, const SharedExp2Table& table) {
  const double rounded = fma(x, c, start);
  double scale, tail;
  ex2_parts(rounded, fma(x, c, -__dsub_rn(rounded, start)), table, scale, tail);
  return fma(scale, tail, scale);
}

}  // namespace cuflash
