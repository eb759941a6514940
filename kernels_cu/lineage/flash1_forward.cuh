// FlashAttention-1 (Dao et al. 2022, Algorithm 1): key tiles outside, query tiles inside. A CTA loads a tile of K and V
// and has its query rows pass by; o and the statistics of each row live in global memory between passes, o as the
// average over the keys so far:
//   o <- (l e^(m - m') o + e^(s - m') v) / l'.
// A CTA owns its rows for all passes, so nothing is shared between CTAs: all rows of a head, as the paper has it, or a
// part of them where heads alone do not fill the device. Its key tile is as large as shared memory allows, and is
// multiplied in parts whose scores fit registers.
//
// Of Params it uses, as there is no lse: row_lse for m, delta for l, dq_accum for o between passes, splits for the
// parts of the rows.
#pragma once
#include "blocks.cuh"
#include "epilogue.cuh"
#include "locate.cuh"
#include "mask.cuh"
#include "pipeline.cuh"
#include "product.cuh"

namespace cuflash {

constexpr int kPartKeys = min_of(kTile.block_n, sizeof(Operand) == 2 ? 64 : sizeof(Operand) == 4 ? 32 : 16);
constexpr int kParts = kTile.block_n / kPartKeys;
static_assert(kParts * kPartKeys == kTile.block_n, "a tile of keys is whole parts");
static_assert(kTile.block_m == 16 * kTile.warps, "each warp owns 16 rows");
static_assert(kRowPadding % kTile.block_m == 0, "tiles of statistics are written whole");
static_assert(kTile.value_dim == kTile.head_dim, "o is staged in q's tile");

struct SharedStorage {
  Gemm::TileB<kPartKeys, kTile.head_dim> k[kParts];
  SharedTile<Operand, kPartKeys, kTile.value_dim> v[kParts];
  Gemm::TileA<kTile.block_m, kTile.head_dim> q[kTile.stages];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

using Scores = Fragment<1, kPartKeys>;
using OutputRows = Fragment<1, kTile.value_dim>;

// Rows of one warp in global memory between passes: o tile by tile in register order, and the statistics.
struct RowState {
  struct alignas(16) Registers {
    Accumulator x[4];
  };
  Accumulator *o, *row_max, *row_sum;

  __device__ __forceinline__ RowState(const Params& params, const BatchIndex& batch, int row0)
      : o(params.dq_accum + offset(params.dq_accum_stride, batch) + i64(row0) * kTile.value_dim + 4 * lane_id()),
        row_max(params.row_lse + offset(params.row_lse_stride, batch) + row0),
        row_sum(params.delta + offset(params.delta_stride, batch) + row0) {}

  __device__ __forceinline__ Registers* tile(int col) const { return reinterpret_cast<Registers*>(o + 16 * col); }

  __device__ __forceinline__ void load(OutputRows& rows) const {
    rows.for_each_tile([&](Accumulator(&x)[4], int, int col) {
      const Registers registers = *tile(col);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = registers.x[i];
    });
  }
  __device__ __forceinline__ void store(OutputRows& rows) const {
    rows.for_each_tile([&](Accumulator(&x)[4], int, int col) { *tile(col) = {x[0], x[1], x[2], x[3]}; });
  }
};

// Scores of keys from key0 on to what the softmax takes: the scale where it comes first, hidden ones -inf.
__device__ __forceinline__ void finish_scores(Scores& s, const Params& params, int row0, int key0) {
  if constexpr (kPrescaled) s.for_each([&](Accumulator& x, int, int, int) { x = apply_terms(params, x, 0).value; });
  const bool whole = key0 + kPartKeys <= params.seqlen_k && key0 + kPartKeys - 1 <= row0 + params.band_hi;
  if (!whole) mask_by_limits(s, params, row0, key0);
}

// One warp's rows of a query tile meet a key tile.
__device__ __forceinline__ void pass(const Params& params, const BatchIndex& batch, SharedStorage& smem, int stage,
                                     int m_block, int key0, bool is_first, bool is_last) {
  const int tile_row0 = m_block * kTile.block_m, warp_row0 = 16 * warp_id(), row0 = tile_row0 + warp_row0;
  const RowState state(params, batch, row0);
  OnlineSoftmax<1> softmax(params.exponent_scale);
  OutputRows o;
  o.clear();
  Accumulator old_sum[2] = {};
  if (!is_first) {
    state.load(o);
    OutputRows::for_each_row([&](int r, int row) {
      old_sum[r] = state.row_sum[row];
      softmax.row_max[r] = state.row_max[row];
      softmax.row_sum[r] = lane_id() % 4 == 0 ? old_sum[r] : 0;  // which is over the columns of each lane
    });
  }
  // Makes the sum of p v again of the average. Once o is there: not before the first scores are formed.
  bool is_sum = is_first;
  const auto to_sum = [&] {
    if (is_sum) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) o.for_each_in_row(r, [&](Accumulator& x) { x *= old_sum[r]; });
    is_sum = true;
  };

  const int last_key = min_of(params.seqlen_k - 1, row0 + 15 + params.band_hi);
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    const int part_key0 = key0 + part * kPartKeys;
    if (part_key0 > last_key) break;
    Scores s;
    s.clear();
    Gemm::nt<kTile.head_dim>(s, smem.q[stage], warp_row0, smem.k[part], 0);
    to_sum();
    finish_scores(s, params, row0, part_key0);
    softmax.update(s, o, [](Accumulator(&)[2]) {});
    accumulate(o, s, smem.v[part]);
  }

  to_sum();
  OutputRows::for_each_row([&](int r, int row) {
    const Accumulator sum = quad_sum(softmax.row_sum[r]);
    const Accumulator average = sum == 0 ? 0 : 1 / sum;
    o.for_each_in_row(r, [&](Accumulator& x) { x *= average; });
    if (lane_id() % 4 == 0) {
      state.row_max[row] = is_last ? softmax.row_max[r] * params.lse_scale : softmax.row_max[r];
      state.row_sum[row] = sum;
    }
  });
  if (is_last) {
    store_rows(o, smem.q[stage], warp_row0, 0, base<Output>(params.o, params.o_stride, batch), params.o_stride,
               tile_row0, params.seqlen_q, params.value_dim, params.store_vector != 0);
  } else {
    state.store(o);
  }
}

__device__ __forceinline__ void flash1_forward(const Params& params, SharedStorage& smem) {
  const int index = work_index();
  const BatchIndex batch = batch_index(params, index / params.splits, 0);
  const SplitBlocks own(0, ceil_div(params.seqlen_q, kTile.block_m), index % params.splits, params.splits);
  const Operand* q_gmem = base<Operand>(params.q, params.q_stride, batch);
  const Operand* k_gmem = base<Operand>(params.k, params.k_stride, batch);
  const Operand* v_gmem = base<Operand>(params.v, params.v_stride, batch);
  const auto load_q = [&](int m_block) {
    load_tile<kLoad, kThreads>(smem.q[m_block % kTile.stages], q_gmem, params.q_stride, m_block * kTile.block_m,
                               params.seqlen_q, params.head_dim);
    copy_commit();
  };

  for (int key0 = 0; key0 < params.seqlen_k; key0 += kTile.block_n) {
    // Every row passes by the first tile, so that rows without keys get their zeros; after that those that see some.
    const int first_row = key0 == 0 ? 0 : max_of(0, key0 - params.band_hi);
    const int begin = max_of(own.begin, first_row / kTile.block_m);
    if (begin >= own.end || first_row >= params.seqlen_q) continue;
    __syncthreads();  // nobody reads the tile before any more
    load_q(begin);
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      const int part_key0 = key0 + part * kPartKeys;
      load_tile<kLoad, kThreads>(smem.k[part], k_gmem, params.k_stride, part_key0, params.seqlen_k, params.head_dim);
      load_tile<kLoad, kThreads>(smem.v[part], v_gmem, params.v_stride, part_key0, params.seqlen_k, params.value_dim);
    }
    copy_commit();
    for (int m_block = begin; m_block < own.end; ++m_block) {
      copy_wait<0>();
      __syncthreads();  // this block of Q, and K and V, have landed for all; nobody reads the other stage any more
      if (kTile.stages > 1 && m_block + 1 < own.end) load_q(m_block + 1);
      const int last_row = min_of((m_block + 1) * kTile.block_m, params.seqlen_q) - 1;
      const bool is_last = key0 + kTile.block_n > min_of(params.seqlen_k - 1, last_row + params.band_hi);
      pass(params, batch, smem, m_block % kTile.stages, m_block, key0, key0 == 0, is_last);
      if (kTile.stages == 1 && m_block + 1 < own.end) {
        __syncthreads();  // nobody reads the only stage any more
        load_q(m_block + 1);
      }
    }
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, 1)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::flash1_forward(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
