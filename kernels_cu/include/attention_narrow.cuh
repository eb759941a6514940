// Forward for few features: exponentials and multiply-adds bound it, so rows are whole in registers and keys lie
// feature by feature (narrow_rows.cuh, feature_tile.cuh). Warps of a CTA share out rows and, where rows are few, keys;
// the grid shares out rows and, where those are too few for the device, parts of the keys. Both numbers are the
// launch's: one kernel serves a million queries and a single one. Merged are (o, lse), in order.
// The outline is host.py's: locate; key blocks; load q; step; finish; epilogue.
#pragma once
#include "blocks.cuh"
#include "locate.cuh"
#include "narrow_rows.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps, kMostRows = kTile.block_m / kTile.warps, kFeatures = kTile.head_dim;
constexpr int kKeys = kTile.block_n, kStages = kTile.stages;
static_assert(kTile.value_dim == kFeatures && kMostRows * kTile.warps == kTile.block_m, "each warp owns whole rows");

using KeyTile = FeatureTile<kFeatures, kKeys>;
constexpr int kTileSteps = kKeys / kStepKeys, kFlushSteps = 64;
static_assert(kTileSteps * kStepKeys == kKeys, "tiles are whole steps");

// A warp's first row, and the steps of keys that its rows see.
struct WarpWork {
  int row0;
  BlockRange steps;
};

struct alignas(128) SharedStorage {
  KeyTile tile[kStages];
  WarpTotals<kMostRows, kFeatures> totals[kTile.warps];
  // What the main loop seldom needs: it has better use for registers.
  Bases bases;
  WarpWork work[kTile.warps];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

// Where a CTA works: rows [row0, row0 + rows) of a batch element, and a part of their keys.
template <int kRows>
struct CtaWork {
  int rows, row0, split, owned;
  __device__ __forceinline__ explicit CtaWork(const Params& params) : rows(kTile.warps / params.key_warps * kRows) {
    const SplitWork work = locate_split_rows(ceil_div(params.seqlen_q, rows), params.splits);
    row0 = work.block * rows, split = work.split, owned = work.owned;
  }
};

// The warps' totals of each row, merged; to o and lse, or to what this split leaves.
template <int kRows>
__device__ __forceinline__ void store_results(const Params& params, const WarpTotals<kRows, kFeatures>* totals) {
  const CtaWork<kRows> work(params);
  const BatchIndex batch = batch_index(params, work.owned, 0);
  const int columns = max_of(1, params.value_dim);
  for (int i = threadIdx.x; i < work.rows * columns; i += kThreads) {
    const int r = i / columns, column = i % columns, row = work.row0 + r;
    if (row >= params.seqlen_q) break;
    RowSums<1> merged;
    for (int w = 0; w < params.key_warps; ++w) {
      const RowSums<kFeatures>& own = totals[r / kRows * params.key_warps + w].row[r % kRows];
      merged.merge({own.max, {own.sums[0], own.sums[1 + column]}});
    }
    if (params.splits > 1) {
      Accumulator* left = split_row(params, work.split, i64(work.owned) * params.seqlen_q + row);
      if (column == 0) left[0] = merged.max, left[1] = merged.sums[0];
      if (params.value_dim > 0) left[2 + column] = merged.sums[1];
      continue;
    }
    Accumulator o_scale, lse;
    merged.finish(o_scale, lse);
    if (column == 0 && params.lse != nullptr)
      base<Accumulator>(params.lse, params.lse_stride, batch)[row * params.lse_stride.row] = lse;
    if (params.value_dim > 0)
      base<Output>(params.o, params.o_stride, batch)[row * params.o_stride.row + column * params.o_stride.col] =
          from_float<Output>(merged.sums[1] * o_scale);
  }
}

template <int kRows>
__device__ __forceinline__ void attention_narrow(const Params& params, SharedStorage& smem) {
  using Rows = NarrowRows<kRows, kFeatures>;
  const CtaWork<kRows> cta(params);
  const BatchIndex batch = batch_index(params, cta.owned, 0);
  const int row0 = cta.row0 + warp_id() / params.key_warps * kRows;

  const BlockRange tiles = key_blocks(params, cta.row0, min_of(cta.row0 + cta.rows, params.seqlen_q), kKeys);
  const i64 count = tiles.end - tiles.begin;
  const int begin = tiles.begin + int(count * cta.split / params.splits),
            end = tiles.begin + int(count * (cta.split + 1) / params.splits);
  if (lane_id() == 0) {
    BlockRange steps{0, 0, 0, 0};  // for a warp beyond the last row
    if (row0 < params.seqlen_q)
      steps = key_blocks(params, row0, min_of(row0 + kRows, params.seqlen_q), kStepKeys);
    smem.work[warp_id()] = {row0, steps};
  }
  if (threadIdx.x == 0) smem.bases = bases_of(params, batch);
  if (params.head_dim < kFeatures || params.value_dim < kFeatures)  // features that no copy writes
    for (int i = threadIdx.x; i < int(sizeof(smem.tile) / sizeof(Accumulator)); i += kThreads)
      reinterpret_cast<Accumulator*>(smem.tile)[i] = 0;
  __syncthreads();  // the bases are there, and the zeros before the first copies land

  const auto load = [&](int block) {
    if (block < end) load_key_tile<kThreads>(params, smem.bases, block * kKeys, smem.tile[block % kStages]);
    copy_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load(begin + i);
  // A single row has totals of its own shape in the same place.
  auto* all_totals = reinterpret_cast<WarpTotals<kRows, kFeatures>*>(smem.totals);
  WarpTotals<kRows, kFeatures>& totals = all_totals[warp_id()];
  Rows rows(params, smem.bases, row0, totals);
  int flushed = begin;
  for (int block = begin;; ++block) {
    if (block >= end || block - flushed >= kFlushSteps / kTileSteps * params.key_warps)
      flushed = block, rows.flush(totals);
    if (block >= end) break;
    copy_wait<kStages - 2>();
    __syncthreads();  // the tile has landed for all; nobody reads the one before it any more
    load(block + kStages - 1);
    const KeyTile& tile = smem.tile[block % kStages];
    const volatile WarpWork& own = smem.work[warp_id()];
    const int first = block * kTileSteps;
    const bool whole = own.steps.full_begin <= first && first + kTileSteps <= own.steps.full_end;
    // The keys of a step are known by their address alone. key_warps is a power of two.
    const u32 tile_end = tile.address(kTileSteps), stride = params.key_warps * kStepBytes;
    for (u32 at = tile.address(warp_id() & (params.key_warps - 1)); at < tile_end; at += stride) {
      bool full = whole;
      if (!whole) {
        const int step = (block + 1) * kTileSteps - int(tile_end - at) / kStepBytes;
        if (step < own.steps.begin || step >= own.steps.end) continue;
        full = step >= own.steps.full_begin && step < own.steps.full_end;
      }
      const bool done = full && (params.key_bias != nullptr ? rows.template fast_step<true, KeyTile>(params, at)
                                                            : rows.template fast_step<false, KeyTile>(params, at));
      if (!done)
        rows.template careful_step<KeyTile>(params, smem.bases, own.row0,
                                            (block + 1) * kKeys - int(tile_end - at) / kStepBytes * kStepKeys, at,
                                            totals);
    }
  }
  __syncthreads();  // the totals of all warps are there
  store_results<kRows>(params, all_totals);
}

}  // namespace cuflash

// A single row takes no more than its own arithmetic.
extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kTile.resident)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::SharedStorage& storage = *reinterpret_cast<cuflash::SharedStorage*>(smem);
  if (params.seqlen_q == 1) {
    cuflash::attention_narrow<1>(params, storage);
  } else {
    cuflash::attention_narrow<cuflash::kMostRows>(params, storage);
  }
}
