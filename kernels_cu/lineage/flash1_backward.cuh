// FlashAttention-1's gradients (Dao et al. 2022, Algorithm 4): key tiles outside, with the sums of their dk and dv in
// registers; query tiles inside, whose sums of dq are read from global memory, added to and written again. One CTA a
// head, so that nobody else adds to them. Each warp owns rows of keys and works on transposed scores, whose
// accumulators are the left operands of dk and dv:
//   s^T = K Q^T,  dp^T = V dO^T,  p = exp(s - m) / l,  ds = p (dp - delta),  dV += p^T dO,  dK += ds^T Q,  dQ += ds K.
// Of Params it uses row_lse, which is m + log l, and delta, which are formed before it, and dq_accum for the sums of
// dq.
#pragma once
#include "blocks.cuh"
#include "epilogue.cuh"
#include "locate.cuh"
#include "pipeline.cuh"
#include "product.cuh"
#include "recompute.cuh"

namespace cuflash {

static_assert(kTile.block_n == 16 * kTile.warps, "each warp owns 16 keys");
static_assert(kTile.block_m % 16 == 0, "p^T is an A operand of whole k steps");
static_assert(kRowPadding % kTile.block_m == 0, "tiles of row vectors load whole");
static_assert(kTile.value_dim == kTile.head_dim, "dv is staged in k's tile");

struct SharedStorage {
  SharedTile<Operand, kTile.block_n, kTile.head_dim> k;
  SharedTile<Operand, kTile.block_n, kTile.value_dim> v;
  SharedTile<Operand, kTile.block_n, kTile.block_m> ds;  // transposed
  Gemm::TileB<kTile.block_m, kTile.head_dim> q;
  Gemm::TileB<kTile.block_m, kTile.value_dim> dout;
  alignas(16) Accumulator lse[kTile.block_m], delta[kTile.block_m];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

using Scores = Fragment<1, kTile.block_m>;  // transposed: rows are keys
using GradientK = Fragment<1, kTile.head_dim>;
using GradientV = Fragment<1, kTile.value_dim>;

// p and ds of scores and dp of keys from key0 on.
__device__ __forceinline__ void to_p_and_ds(Scores& s, Scores& dp, const Params& params, const SharedStorage& smem,
                                            const Exp2& exp2, int row0, int key0) {
  s.for_each_with(dp, [&](Accumulator& s_or_p, Accumulator& dp_or_ds, int, int key, int row) {
    const Accumulator score = apply_terms(params, s_or_p, 0).value;
    const bool seen = key0 + key < params.seqlen_k && key0 + key <= row0 + row + params.band_hi;
    const Accumulator p = probability<true>(params, exp2, score, smem.lse[row]);  // by whole warps
    s_or_p = seen ? p : 0;
    dp_or_ds = s_or_p * (dp_or_ds - smem.delta[row]);
  });
}

// dq of the query tile from row0 on, in pieces of 16 columns that the warps share out: sums so far, but for the first
// pass, and this pass's. The last pass rounds them to dq.
__device__ __forceinline__ void add_dq(const Params& params, const BatchIndex& batch, const SharedStorage& smem,
                                       int row0, bool is_first, bool is_last) {
  constexpr int kCols = 16, kColumnPieces = kTile.head_dim / kCols, kPieces = kTile.block_m / 16 * kColumnPieces;
  struct alignas(16) Registers {
    Accumulator x[4];
  };
  for (int piece = warp_id(); piece < kPieces; piece += kTile.warps) {
    const int row = piece / kColumnPieces * 16, col0 = piece % kColumnPieces * kCols;
    Accumulator* const lane_gmem = params.dq_accum + offset(params.dq_accum_stride, batch) +
                                   i64(row0 + row) * kTile.head_dim + 16 * col0 + 4 * lane_id();
    const auto tile_at = [&](int col) { return reinterpret_cast<Registers*>(lane_gmem + 16 * col); };
    Fragment<1, kCols> dq;
    dq.clear();
    if (!is_first) {
      dq.for_each_tile([&](Accumulator(&x)[4], int, int col) {
        const Registers registers = *tile_at(col);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = registers.x[i];
      });
    }
    Gemm::tn<kTile.block_n>(dq, smem.ds, row, smem.k, col0);
    if (is_last) {
      Output* const dq_gmem = base<Output>(params.dq, params.dq_stride, batch);
      dq.for_each([&](Accumulator& x, int, int tile_row, int tile_col) {
        const int at = row0 + row + tile_row, col = col0 + tile_col;
        if (at < params.seqlen_q && col < params.head_dim)
          dq_gmem[at * params.dq_stride.row + col * params.dq_stride.col] = from_float<Output>(x * params.scale);
      });
    } else {
      dq.for_each_tile([&](Accumulator(&x)[4], int, int col) { *tile_at(col) = {x[0], x[1], x[2], x[3]}; });
    }
  }
}

__device__ __forceinline__ void flash1_backward(const Params& params, SharedStorage& smem) {
  const BatchIndex batch = batch_index(params, work_index(), 0);
  const Operand* q_gmem = base<Operand>(params.q, params.q_stride, batch);
  const Operand* k_gmem = base<Operand>(params.k, params.k_stride, batch);
  const Operand* v_gmem = base<Operand>(params.v, params.v_stride, batch);
  const Operand* dout_gmem = base<Operand>(params.dout, params.dout_stride, batch);
  const i64 row_vector = offset(params.row_lse_stride, batch);  // where lse and delta begin, which lie alike
  const int warp_key0 = 16 * warp_id(), m_blocks = ceil_div(params.seqlen_q, kTile.block_m);
  const Exp2 exp2(lane_id());

  for (int key0 = 0; key0 < params.seqlen_k; key0 += kTile.block_n) {
    GradientK dk;
    GradientV dv;
    dk.clear();
    dv.clear();
    __syncthreads();  // nobody reads the tile before any more
    load_tile<kLoad, kThreads>(smem.k, k_gmem, params.k_stride, key0, params.seqlen_k, params.head_dim);
    load_tile<kLoad, kThreads>(smem.v, v_gmem, params.v_stride, key0, params.seqlen_k, params.value_dim);
    copy_commit();
    // Every row passes by the first tile, so that rows without keys get their zeros; after that those that see some.
    const int first_row = max_of(0, key0 - params.band_hi);
    const int begin = key0 == 0 ? 0 : first_row >= params.seqlen_q ? m_blocks : first_row / kTile.block_m;
    for (int m_block = begin; m_block < m_blocks; ++m_block) {
      const int row0 = m_block * kTile.block_m;
      load_tile<kLoad, kThreads>(smem.q, q_gmem, params.q_stride, row0, params.seqlen_q, params.head_dim);
      load_tile<kLoad, kThreads>(smem.dout, dout_gmem, params.dout_stride, row0, params.seqlen_q, params.value_dim);
      load_row_vector<kThreads, kTile.block_m>(smem.lse, params.row_lse + row_vector + row0);
      load_row_vector<kThreads, kTile.block_m>(smem.delta, params.delta + row_vector + row0);
      copy_commit();
      copy_wait<0>();
      __syncthreads();  // everything has landed for all
      Scores s, dp;
      s.clear();
      Gemm::nt<kTile.head_dim>(s, smem.k, warp_key0, smem.q, 0);
      dp.clear();
      Gemm::nt<kTile.value_dim>(dp, smem.v, warp_key0, smem.dout, 0);
      to_p_and_ds(s, dp, params, smem, exp2, row0, key0 + warp_key0);
      store_fragment(dp, smem.ds, warp_key0, 0);
      accumulate(dv, s, smem.dout);
      accumulate(dk, dp, smem.q);
      __syncthreads();  // ds of all keys is complete; nobody reads the queries any more
      const int last_row = min_of(row0 + kTile.block_m, params.seqlen_q) - 1;
      const bool is_last = key0 + kTile.block_n > min_of(params.seqlen_k - 1, last_row + params.band_hi);
      add_dq(params, batch, smem, row0, key0 == 0, is_last);
    }
    copy_wait<0>();
    __syncthreads();  // nobody reads K any more, where the results are staged, and without queries it has landed
    dk.for_each([&](Accumulator& x, int, int, int) { x *= params.scale; });
    store_rows(dk, smem.k, warp_key0, 0, base<Output>(params.dk, params.dk_stride, batch), params.dk_stride, key0,
               params.seqlen_k, params.head_dim, params.store_vector != 0);
    store_rows(dv, smem.k, warp_key0, 0, base<Output>(params.dv, params.dv_stride, batch), params.dv_stride, key0,
               params.seqlen_k, params.value_dim, params.store_vector != 0);
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::flash1_backward(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
