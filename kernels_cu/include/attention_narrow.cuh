// Forward for few features: exponentials and multiply-adds bound it, so rows are whole in registers and keys lie
// feature by feature (narrow_rows.cuh, feature_tile.cuh). Warps of a CTA share out rows and, where rows are few, keys;
// the grid shares out rows and, where those are too few for the device, parts of the keys. Both numbers are the
// launch's: one kernel serves a million queries and a single one.
// The outline is host.py's: locate; key blocks; load q; step; finish; epilogue.
#pragma once
#include "narrow_rows.cuh"
#include "narrow_work.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps, kMostRows = kTile.block_m / kTile.warps, kFeatures = kTile.head_dim;
constexpr int kKeys = kTile.block_n, kStages = kTile.stages;
static_assert(kTile.value_dim == kFeatures && kMostRows * kTile.warps == kTile.block_m, "each warp owns whole rows");

using KeyTile = FeatureTile<kFeatures, kKeys>;
constexpr int kTileSteps = kKeys / kStepKeys, kFlushSteps = 64;
static_assert(kTileSteps * kStepKeys == kKeys, "tiles are whole steps");

struct alignas(128) SharedStorage {
  KeyTile tile[kStages];
  WarpTotals<kMostRows, kFeatures> totals[kTile.warps];
  // What the main loop seldom needs: it has better use for registers.
  Bases bases;
  WarpWork work[kTile.warps];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

template <int kRows>
__device__ __forceinline__ void attention_narrow(const Params& params, SharedStorage& smem) {
  using Rows = NarrowRows<kRows, kFeatures>;
  const CtaWork<kRows> cta(params);
  const int row0 = cta.warp_row0(params);

  const BlockRange tiles = key_blocks(params, cta.row0, min_of(cta.row0 + cta.rows, params.seqlen_q), kKeys);
  const SplitBlocks part(tiles.begin, tiles.end - tiles.begin, cta.split, params.splits);
  const int begin = part.begin, end = part.end;
  if (lane_id() == 0) smem.work[warp_id()] = warp_work<kRows>(params, row0, kStepKeys);
  if (threadIdx.x == 0) smem.bases = bases_of(params, cta.owned);
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
    for (u32 at = tile.address(key_warp(params)); at < tile_end; at += stride) {
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
