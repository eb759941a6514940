// Forward: one CTA a tile of query rows, key blocks from last to first, K and V refilled while the other is in use.
// The outline is host.py's: locate; key blocks; load Q; step; finish; epilogue.
#pragma once
#include "blocks.cuh"
#include "epilogue.cuh"
#include "locate.cuh"
#include "mask.cuh"
#include "pipeline.cuh"
#include "product.cuh"
#include "softmax.cuh"

namespace cuflash {

constexpr int kMTiles = kTile.block_m / (16 * kRowWarps), kSlots = 2 * kMTiles;
constexpr int kWarpKeys = kTile.block_n / kColumnWarps, kWarpFeatures = kTile.value_dim / kColumnWarps;
static_assert(kMTiles * 16 * kRowWarps == kTile.block_m, "each warp owns whole 16-row tiles");
static_assert(kTile.value_dim <= kTile.head_dim, "o is staged in q's tile");
static_assert(kTile.block_n % 16 == 0, "p is an A operand of whole k steps");

struct PrivateStorage {
  Gemm::TileA<kTile.block_m, kTile.head_dim> q;
  Gemm::TileB<kTile.block_n, kTile.head_dim> k;
  ConditionalType<kTile.low_bits == 2, Gemm::TileB<kTile.block_n, kTile.value_dim>,
                  SharedTile<Operand, kTile.block_n, kTile.value_dim>>
      v;
};
template <int kKeys>  // a template so that a tile that keeps p in registers may be too narrow for it
struct SharingStorage : PrivateStorage {
  SharedTile<Operand, kTile.block_m, kKeys> p;
  RowExchange<kTile.block_m> row;
};
using SharedStorage = ConditionalType<kShareOperands, SharingStorage<kTile.block_n>, PrivateStorage>;
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

using Scores = Fragment<kMTiles, kWarpKeys>;
using OutputRows = Fragment<kMTiles, kWarpFeatures>;

// Score terms and, unless the whole block is seen, masks; row0 and key0 are the first of the warp's tile.
template <bool kMasked>
__device__ __forceinline__ void apply_score_terms(Scores& s, const Params& params, const KeyBias& key_bias, int row0,
                                                  int key0) {
  // Where registers are left for the limits.
  constexpr bool kByLimits = kMasked && sizeof(Operand) == 2 && kTile.value_dim <= 64;
  const Band band{params.band_lo, params.band_hi};
  s.for_each([&](Accumulator& x, int, int row, int col) {
    const int key = key0 + col;
    const bool exists = !kMasked || key < params.seqlen_k;
    x = apply_terms(params, x, kKeyBias && exists ? key_bias.value(key) : 0).value;
    if constexpr (kMasked && !kByLimits) x = exists && band.keeps(row0 + row, key) ? x : neg_inf();
  });
  if constexpr (kByLimits) mask_by_limits(s, params, row0, key0);
}

// Row maxima and sums over the columns of all warps that share the rows.
template <class Storage, class Combine>
__device__ __forceinline__ void over_row(Storage& smem, Accumulator (&x)[kSlots], Combine combine) {
  if constexpr (kShareOperands) exchange(smem.row, x, warp_row() * 16 * kMTiles, combine);
}

// o += p v.
template <class Storage>
__device__ __forceinline__ void accumulate_o(OutputRows& o, const Scores& p, Storage& smem) {
  if constexpr (kShareOperands) {
    store_scores(p, smem.p);
    __syncthreads();  // p of all keys is complete; the barriers of the next step free it again
    accumulate(o, smem.p, smem.v);
  } else {
    accumulate(o, p, smem.v);
  }
}

__device__ __forceinline__ void store_results(const Params& params, OutputRows& o,
                                              const OnlineSoftmax<kMTiles>& softmax, SharedStorage& smem) {
  const Work work = locate_rows(ceil_div(params.seqlen_q, kTile.block_m));
  const BatchIndex batch = batch_index(params, work.owned, 0);
  const int tile_row0 = work.block * kTile.block_m, rows = min_of(kTile.block_m, params.seqlen_q - tile_row0);
  const int warp_row0 = warp_row() * 16 * kMTiles;
  Accumulator sum[kSlots], o_scale[kSlots], lse[kSlots];
#pragma unroll
  for (int r = 0; r < kSlots; ++r) sum[r] = quad_sum(softmax.row_sum[r]);
  over_row(smem, sum, [](Accumulator a, Accumulator b) { return a + b; });
#pragma unroll
  for (int r = 0; r < kSlots; ++r) softmax.finish(r, sum[r], params.lse_scale, o_scale[r], lse[r]);
  if (params.lse != nullptr && warp_column() == 0 && lane_id() % 4 == 0) {  // one lane of those that share the row
    Accumulator* lse_gmem =
        base<Accumulator>(params.lse, params.lse_stride, batch) + (tile_row0 + warp_row0) * params.lse_stride.row;
    Scores::for_each_row([&](int r, int row) {
      if (warp_row0 + row < rows) lse_gmem[row * params.lse_stride.row] = lse[r];
    });
  }
  if (params.value_dim == 0) return;
  o.for_each([&](Accumulator& x, int slot, int, int) { x *= o_scale[slot]; });
  store_rows(o, smem.q, warp_row0, warp_column() * kWarpFeatures, base<Output>(params.o, params.o_stride, batch),
             params.o_stride, tile_row0, params.seqlen_q, params.value_dim, params.store_vector != 0);
}

__device__ __forceinline__ void attention_forward(const Params& params, SharedStorage& smem) {
  const Work work = locate_rows(ceil_div(params.seqlen_q, kTile.block_m));
  const BatchIndex batch = batch_index(params, work.owned, 0);
  const int tile_row0 = work.block * kTile.block_m, rows = min_of(kTile.block_m, params.seqlen_q - tile_row0);
  const int warp_row0 = warp_row() * 16 * kMTiles, warp_key0 = warp_column() * kWarpKeys;
  const Operand* q_gmem = base<Operand>(params.q, params.q_stride, batch);
  const Operand* k_gmem = base<Operand>(params.k, params.k_stride, batch);
  const Operand* v_gmem = base<Operand>(params.v, params.v_stride, batch);
  const KeyBias key_bias{params.key_bias == nullptr ? nullptr : params.key_bias + offset(params.key_bias_stride, batch),
                         params.key_bias_stride.row};

  const BlockRange blocks = key_blocks(params, tile_row0, tile_row0 + rows, kTile.block_n);
  const bool has_value = params.value_dim > 0;
  const auto load_k = [&](int block) {
    load_tile<kLoad, kThreads>(smem.k, k_gmem, params.k_stride, block * kTile.block_n, params.seqlen_k,
                               params.head_dim);
    copy_commit();
  };
  const auto load_v = [&](int block) {
    load_tile<kLoad, kThreads>(smem.v, v_gmem, params.v_stride, block * kTile.block_n, params.seqlen_k,
                               params.value_dim);
    copy_commit();
  };

  OutputRows o;
  o.clear();
  OnlineSoftmax<kMTiles> softmax(params.exponent_scale);

  const auto step = [&](int block) {
    copy_wait<0>();
    Gemm::prepare<kThreads>(smem.k);
    __syncthreads();  // K(block), and Q, have landed for all; nobody reads V of the block before any more
    if (has_value) load_v(block);
    Scores s;
    s.clear();
    Gemm::nt<kTile.head_dim>(s, smem.q, warp_row0, smem.k, warp_key0);
    copy_wait<0>();
    if (has_value) Gemm::prepare<kThreads>(smem.v);
    __syncthreads();  // V(block) has landed for all; nobody reads K(block) any more
    if (block > blocks.begin) load_k(block - 1);
    if (blocks.is_full(block)) {
      apply_score_terms<false>(s, params, key_bias, tile_row0 + warp_row0, block * kTile.block_n + warp_key0);
    } else {
      apply_score_terms<true>(s, params, key_bias, tile_row0 + warp_row0, block * kTile.block_n + warp_key0);
    }
    softmax.update(s, o, [&](Accumulator(&row_max)[kSlots]) {
      over_row(smem, row_max, [](Accumulator a, Accumulator b) { return larger(a, b); });
    });
    if (has_value) accumulate_o(o, s, smem);
  };

  if (blocks.end > blocks.begin) {
    load_tile<kLoad, kThreads>(smem.q, q_gmem, params.q_stride, tile_row0, params.seqlen_q, params.head_dim);
    load_k(blocks.end - 1);
  }
  if constexpr (kTf32) {
    copy_wait<0>();
    Gemm::prepare<kThreads>(smem.q);  // before the barrier of the first step
  }
  for (int block = blocks.end - 1; block >= blocks.begin; --block) step(block);

  if constexpr (kShareOperands) __syncthreads();  // nobody reads row maxima any more, where the sums will be
  store_results(params, o, softmax, smem);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kTile.resident)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
