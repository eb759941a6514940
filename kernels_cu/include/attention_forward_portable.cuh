// Forward: one CTA a tile of query rows, key blocks from last to first, K and V refilled while the other is in use.
// The outline is host.py's: locate; key blocks; load Q; step; finish; epilogue.
#pragma once
#include "blocks.cuh"
#include "epilogue.cuh"
#include "locate.cuh"
#include "mask.cuh"
#include "pipeline.cuh"
#include "product.cuh"
#include "softmax_table.cuh"

namespace cuflash {

constexpr int kMTiles = kTile.block_m / (16 * kRowWarps), kSlots = 2 * kMTiles;
// Where features are too few to be divided, column warps keep sums over keys of their own, which meet when all is done.
constexpr bool kSplitKeys = kShareOperands && kTile.value_dim / kColumnWarps < 8;
constexpr bool kShareRows = kShareOperands && !kSplitKeys;
constexpr int kWarpKeys = kTile.block_n / kColumnWarps;
constexpr int kWarpFeatures = kSplitKeys ? kTile.value_dim : kTile.value_dim / kColumnWarps;
// Where exponentials are most of the time.
constexpr bool kTableSoftmax = sizeof(Accumulator) == 8 && kTile.head_dim <= 8;
static_assert(kMTiles * 16 * kRowWarps == kTile.block_m, "each warp owns whole 16-row tiles");
static_assert(kTile.value_dim <= kTile.head_dim, "o is staged in q's tile");
static_assert((kShareRows ? kTile.block_n : kWarpKeys) % 16 == 0, "p is an A operand of whole k steps");
static_assert(!kTableSoftmax || !kShareRows, "each warp decides for its rows");

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
template <int kWarps>  // a template for the same reason
struct SplittingStorage : PrivateStorage {
  SharedTile<Operand, kTile.block_m, kTile.value_dim> o[kWarps - 1];  // of the column warps but the first
  RowExchange<kTile.block_m> row;
};
using Storage =
    ConditionalType<kShareRows, SharingStorage<kTile.block_n>,
                    ConditionalType<kSplitKeys, SplittingStorage<kSplitKeys ? kColumnWarps : 2>, PrivateStorage>>;
struct TableStorage : Storage {
  Exp2Roots roots;
};
using SharedStorage = ConditionalType<kTableSoftmax, TableStorage, Storage>;
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

using Scores = Fragment<kMTiles, kWarpKeys>;
using OutputRows = Fragment<kMTiles, kWarpFeatures>;
using Softmax = ConditionalType<kTableSoftmax, TableSoftmax<kMTiles>, OnlineSoftmax<kMTiles>>;

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

// Row maxima and sums over the columns of all warps that hold some of the rows' keys.
template <class Storage, class Combine>
__device__ __forceinline__ void over_row(Storage& smem, Accumulator (&x)[kSlots], Combine combine) {
  if constexpr (kShareOperands) exchange(smem.row, x, warp_row() * 16 * kMTiles, combine);
}

// Exponentials may need a table in shared memory, which is there after the next barrier.
template <class Softmax, class Storage>
__device__ __forceinline__ void start_table(Softmax& softmax, Storage& smem) {
  if constexpr (kTableSoftmax) {
    smem.roots.template fill<kThreads>();
    softmax.table = SharedExp2Table(smem.roots);
  }
}

// o += p v.
template <class Storage>
__device__ __forceinline__ void accumulate_o(OutputRows& o, const Scores& p, Storage& smem) {
  if constexpr (kShareRows) {
    store_scores(p, smem.p);
    __syncthreads();  // p of all keys is complete; the barriers of the next step free it again
    accumulate(o, smem.p, smem.v);
  } else if constexpr (kSplitKeys) {
    Gemm::nn<kWarpKeys>(o, p, smem.v, 0, warp_column() * kWarpKeys);
  } else {
    accumulate(o, p, smem.v);
  }
}

// Brings the column warps, each of which has summed over keys of its own, to a common reference and adds up their o,
// in the first of them.
template <class Storage, class Softmax>
__device__ __forceinline__ void merge_keys(OutputRows& o, Softmax& softmax, Storage& smem) {
  Accumulator max[kSlots];
#pragma unroll
  for (int r = 0; r < kSlots; ++r) max[r] = softmax.row_max[r];
  over_row(smem, max, [](Accumulator a, Accumulator b) { return larger(a, b); });
  softmax.move_to(max, o);
  if (warp_column() > 0) store_fragment(o, smem.o[warp_column() - 1], warp_row() * 16 * kMTiles, 0);
  __syncthreads();  // o of all warps is there, and nobody reads maxima any more
  if (warp_column() > 0) return;
#pragma unroll
  for (int column = 1; column < kColumnWarps; ++column)
    o.for_each([&](Accumulator& x, int, int row, int col) {
      x += smem.o[column - 1].at(warp_row() * 16 * kMTiles + row, col / kChunkOf<Operand>)[col % kChunkOf<Operand>];
    });
}

__device__ __forceinline__ void store_results(const Params& params, OutputRows& o, Softmax& softmax,
                                              SharedStorage& smem) {
  const Work work = locate_rows(ceil_div(params.seqlen_q, kTile.block_m));
  const BatchIndex batch = batch_index(params, work.owned, 0);
  const int tile_row0 = work.block * kTile.block_m, warp_row0 = warp_row() * 16 * kMTiles;
  if constexpr (kSplitKeys) merge_keys(o, softmax, smem);
  Accumulator sum[kSlots];
#pragma unroll
  for (int r = 0; r < kSlots; ++r) sum[r] = quad_sum(softmax.row_sum[r]);
  over_row(smem, sum, [](Accumulator a, Accumulator b) { return a + b; });
  finish_rows(o, softmax, sum, params, batch, tile_row0 + warp_row0, warp_column() == 0);
  if (params.value_dim == 0 || (kSplitKeys && warp_column() > 0)) return;
  store_rows(o, smem.q, warp_row0, kSplitKeys ? 0 : warp_column() * kWarpFeatures,
             base<Output>(params.o, params.o_stride, batch), params.o_stride, tile_row0, params.seqlen_q,
             params.value_dim, params.store_vector != 0);
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
  Softmax softmax(params.exponent_scale);
  start_table(softmax, smem);

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

  if constexpr (kShareRows) __syncthreads();  // nobody reads row maxima any more, where the sums will be
  store_results(params, o, softmax, smem);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kTile.resident)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::attention_forward(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
