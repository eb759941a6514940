// Products of a warpgroup on the tensor cores of sm_90: 64 rows of A by kN columns of B, 16 deep, in 16-bit operands
// with float sums. The sums of a warp are an accumulator fragment of its 16 rows (fragment.cuh). A comes from shared
// memory, rows along k, or from registers, as accumulators pack into it; B from shared memory, as a descriptor says.
//
// A wgmma runs on its own until it is waited for: nothing may touch its registers or its shared memory meanwhile.
#pragma once
#include "common.cuh"

namespace cuflash {

// Before the first wgmma of a batch: registers that were written are there.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending batches are on their way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d = A B, or d += A B where `add`.
template <int kN>
struct Wgmma;

// clang-format off
// Names of 8 i registers, and the operands that stand behind them.
#define CUFLASH_REGS1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define CUFLASH_REGS2 CUFLASH_REGS1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define CUFLASH_REGS3 CUFLASH_REGS2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define CUFLASH_REGS4 CUFLASH_REGS3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define CUFLASH_REGS5 CUFLASH_REGS4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define CUFLASH_REGS6 CUFLASH_REGS5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define CUFLASH_REGS7 CUFLASH_REGS6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define CUFLASH_REGS8 CUFLASH_REGS7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define CUFLASH_REGS9 CUFLASH_REGS8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define CUFLASH_REGS10 CUFLASH_REGS9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define CUFLASH_REGS11 CUFLASH_REGS10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define CUFLASH_REGS12 CUFLASH_REGS11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define CUFLASH_REGS13 CUFLASH_REGS12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define CUFLASH_REGS14 CUFLASH_REGS13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define CUFLASH_REGS15 CUFLASH_REGS14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define CUFLASH_REGS16 CUFLASH_REGS15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define CUFLASH_SUMS1 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define CUFLASH_SUMS2 CUFLASH_SUMS1, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define CUFLASH_SUMS3 CUFLASH_SUMS2, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define CUFLASH_SUMS4 CUFLASH_SUMS3, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define CUFLASH_SUMS5 CUFLASH_SUMS4, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define CUFLASH_SUMS6 CUFLASH_SUMS5, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define CUFLASH_SUMS7 CUFLASH_SUMS6, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define CUFLASH_SUMS8 CUFLASH_SUMS7, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define CUFLASH_SUMS9 CUFLASH_SUMS8, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define CUFLASH_SUMS10 CUFLASH_SUMS9, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define CUFLASH_SUMS11 CUFLASH_SUMS10, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define CUFLASH_SUMS12 CUFLASH_SUMS11, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define CUFLASH_SUMS13 CUFLASH_SUMS12, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define CUFLASH_SUMS14 CUFLASH_SUMS13, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define CUFLASH_SUMS15 CUFLASH_SUMS14, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define CUFLASH_SUMS16 CUFLASH_SUMS15, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// clang-format on

#define CUFLASH_WGMMA(N, TYPE, REGS, A, B, ADD, FLAGS)                                                                 \
  "{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS \
  "}, " A ", " B ", p, 1, 1, " FLAGS "; }"

// From numbers of the operands behind the sums: R0 to R5.
#define CUFLASH_WGMMA_STRUCT(N, I, R0, R1, R2, R3, R4, R5)                                                      \
  template <>                                                                                                   \
  struct Wgmma<N> {                                                                                             \
    /* A and B rows along k, in shared memory */                                                                \
    static __device__ __forceinline__ void nt(float (&d)[N / 2], u64 a, u64 b, int add, Half) {                 \
      asm volatile(CUFLASH_WGMMA(N, "f16", CUFLASH_REGS##I, R0, R1, R2, "0, 0")                                 \
                   : CUFLASH_SUMS##I                                                                            \
                   : "l"(a), "l"(b), "r"(add));                                                                 \
    }                                                                                                           \
    static __device__ __forceinline__ void nt(float (&d)[N / 2], u64 a, u64 b, int add, BFloat16) {             \
      asm volatile(CUFLASH_WGMMA(N, "bf16", CUFLASH_REGS##I, R0, R1, R2, "0, 0")                                \
                   : CUFLASH_SUMS##I                                                                            \
                   : "l"(a), "l"(b), "r"(add));                                                                 \
    }                                                                                                           \
    /* A and B columns along k, in shared memory */                                                             \
    static __device__ __forceinline__ void tn(float (&d)[N / 2], u64 a, u64 b, int add, Half) {                 \
      asm volatile(CUFLASH_WGMMA(N, "f16", CUFLASH_REGS##I, R0, R1, R2, "1, 1")                                 \
                   : CUFLASH_SUMS##I                                                                            \
                   : "l"(a), "l"(b), "r"(add));                                                                 \
    }                                                                                                           \
    static __device__ __forceinline__ void tn(float (&d)[N / 2], u64 a, u64 b, int add, BFloat16) {             \
      asm volatile(CUFLASH_WGMMA(N, "bf16", CUFLASH_REGS##I, R0, R1, R2, "1, 1")                                \
                   : CUFLASH_SUMS##I                                                                            \
                   : "l"(a), "l"(b), "r"(add));                                                                 \
    }                                                                                                           \
    /* A in registers, B rows along k; d += A B */                                                              \
    static __device__ __forceinline__ void rt(float (&d)[N / 2], const u32 (&a)[4], u64 b, Half) {              \
      asm volatile(CUFLASH_WGMMA(N, "f16", CUFLASH_REGS##I, "{" R0 "," R1 "," R2 "," R3 "}", R4, R5, "0")       \
                   : CUFLASH_SUMS##I                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                               \
    }                                                                                                           \
    static __device__ __forceinline__ void rt(float (&d)[N / 2], const u32 (&a)[4], u64 b, BFloat16) {          \
      asm volatile(CUFLASH_WGMMA(N, "bf16", CUFLASH_REGS##I, "{" R0 "," R1 "," R2 "," R3 "}", R4, R5, "0")      \
                   : CUFLASH_SUMS##I                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                               \
    }                                                                                                           \
    /* A in registers, B columns along k */                                                                     \
    static __device__ __forceinline__ void nn(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add, Half) {     \
      asm volatile(CUFLASH_WGMMA(N, "f16", CUFLASH_REGS##I, "{" R0 "," R1 "," R2 "," R3 "}", R4, R5, "1")       \
                   : CUFLASH_SUMS##I                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                             \
    }                                                                                                           \
    static __device__ __forceinline__ void nn(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add, BFloat16) { \
      asm volatile(CUFLASH_WGMMA(N, "bf16", CUFLASH_REGS##I, "{" R0 "," R1 "," R2 "," R3 "}", R4, R5, "1")      \
                   : CUFLASH_SUMS##I                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                             \
    }                                                                                                           \
  }

CUFLASH_WGMMA_STRUCT(64, 4, "%32", "%33", "%34", "%35", "%36", "%37");
CUFLASH_WGMMA_STRUCT(80, 5, "%40", "%41", "%42", "%43", "%44", "%45");
CUFLASH_WGMMA_STRUCT(96, 6, "%48", "%49", "%50", "%51", "%52", "%53");
CUFLASH_WGMMA_STRUCT(128, 8, "%64", "%65", "%66", "%67", "%68", "%69");
CUFLASH_WGMMA_STRUCT(192, 12, "%96", "%97", "%98", "%99", "%100", "%101");
CUFLASH_WGMMA_STRUCT(256, 16, "%128", "%129", "%130", "%131", "%132", "%133");

}  // namespace cuflash
