// Forward for few features on sm_90, where rows of K and V lie one after the other from multiples of 16 bytes on, and
// key_bias likewise: exponentials and multiply-adds bound it. The work is shared out as in attention_narrow.cuh; tiles
// of keys come by the copy engine, raw (key_tile_sm90.cuh).
//
// The outline is host.py's: locate; key blocks; load q; step; finish; epilogue.
#include "narrow_rows_sm90.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps, kRows = kTile.block_m / kTile.warps;
constexpr int kTileSteps = kKeys / kStepKeys, kFlushSteps = 64;
static_assert(kRows * kTile.warps == kTile.block_m, "each warp owns whole rows");
static_assert(kTileSteps * kStepKeys == kKeys, "tiles are whole steps");

using Rows = NarrowRows<kRows>;

struct alignas(128) SharedStorage {
  KeyTile tile[kStages];
  WarpTotals<kRows, kFeatures> totals[kTile.warps];
  // What the main loop seldom needs: it has better use for registers.
  Bases bases;
  WarpWork work[kTile.warps];
  alignas(16) u32 saved[kTile.warps][Rows::kSavedVectors][32][4];  // sums of each lane, set aside
  KeyBarriers barriers;
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

__device__ __forceinline__ bool bet_on_tile(const Params& params, Rows& rows, const KeyTile& tile, int step0) {
  const u32 at = lane_address(tile, step0), end = lane_address(tile, kTileSteps);
  const u32 stride = params.key_warps * kStepBytes;
  const u32 bias_at = lane_bias_address(tile, step0), bias_stride = params.key_warps * kStepBias;
  if (params.value_dim > 0)
    return params.key_bias != nullptr ? rows.template bet_on_tile<true, true>(at, end, stride, bias_at, bias_stride)
                                      : rows.template bet_on_tile<false, true>(at, end, stride, 0, 0);
  return params.key_bias != nullptr ? rows.template bet_on_tile<true, false>(at, end, stride, bias_at, bias_stride)
                                    : rows.template bet_on_tile<false, false>(at, end, stride, 0, 0);
}

__device__ __forceinline__ void attention_narrow(const Params& params, SharedStorage& smem) {
  const CtaWork<kRows> cta(params);
  const int row0 = cta.warp_row0(params);
  const TilePart part(params, cta);
  if (threadIdx.x == 0) start_barriers(params, smem, cta.owned);
  __syncwarp();  // bases and barriers are there for the first warp
  load_first_tiles(params, smem, part);
  if (lane_id() == 0) smem.work[warp_id()] = warp_work<kRows>(params, row0, kStepKeys);
  __syncthreads();  // they are there for all
  auto& totals = smem.totals[warp_id()];
  Rows rows(params, smem.bases, row0, totals);
  const u32 saved = shared_address(&smem.saved[warp_id()][0][lane_id()][0]);
  const int step0 = key_warp(params);

  bool sure = false;  // the last bet of this warp was won
  const auto work_on = [&](int block, const KeyTile& tile) {
    const volatile WarpWork& own = smem.work[warp_id()];
    const int first = block * kTileSteps;
    const bool whole = own.steps.full_begin <= first && first + kTileSteps <= own.steps.full_end,
               guess = block == part.begin;  // that the first step's maxima are good references for all of the tile
    if (whole && (sure || guess)) {
      if (guess)
        rows.move_references(params.key_bias != nullptr, lane_address(tile, step0), lane_bias_address(tile, step0),
                             totals);
      rows.save(saved);
      sure = bet_on_tile(params, rows, tile, step0);
      if (sure) return;
      rows.restore(saved);
    }
#pragma unroll 1
    for (int i = step0; i < kTileSteps; i += params.key_warps) {
      const int step = first + i;
      if (step < own.steps.begin || step >= own.steps.end) continue;
      const u32 at = lane_address(tile, i), bias_at = lane_bias_address(tile, i);
      const bool full = step >= own.steps.full_begin && step < own.steps.full_end,
                 has_bias = params.key_bias != nullptr;
      sure = false;
#pragma unroll 1
      for (int attempt = 0; full && !sure && attempt < 2; ++attempt) {
        if (attempt == 1) rows.flush(totals), rows.move_references(has_bias, at, bias_at, totals);
        sure = has_bias ? rows.template bet_on_step<true>(params, at, bias_at)
                        : rows.template bet_on_step<false>(params, at, bias_at);
      }
      if (!sure) rows.careful_step(params, smem.bases, own.row0, step * kStepKeys, at, bias_at, totals);
    }
  };
  for_each_tile(params, smem, part, kFlushSteps / kTileSteps * params.key_warps, work_on, [&] { rows.flush(totals); });
  __syncthreads();  // the totals of all warps are there
  store_results<kRows>(params, smem.totals);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kTile.resident)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::attention_narrow(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
