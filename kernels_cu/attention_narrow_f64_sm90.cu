// Forward for few features in float64 on sm_90, where rows of K and V lie as attention_narrow_sm90.cu has them.
// Products on tensor cores take fewer instructions than multiply-adds, and no more of the pipe that they share with
// exponentials, which bound the kernel. The work is shared out as in attention_narrow.cuh; tiles of keys come raw
// (key_tile_sm90.cuh).
//
// The outline is host.py's: locate; key blocks; load q; step; finish; epilogue.
#include "narrow_mma_sm90.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps, kRows = kTile.block_m / kTile.warps;
constexpr int kTileSteps = kKeys / kStepKeys, kFlushSteps = 64;
static_assert(kRows == 16 && kRows * kTile.warps == kTile.block_m, "each warp has one fragment's rows");
static_assert(kTileSteps * kStepKeys == kKeys, "tiles are whole steps");

struct alignas(128) SharedStorage {
  KeyTile tile[kStages];
  MmaTotals totals[kTile.warps];
  // What the main loop seldom needs: it has better use for registers.
  Bases bases;
  WarpWork work[kTile.warps];
  Exp2Roots roots;
  StepConstants constants;
  KeyBarriers barriers;
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

__device__ __forceinline__ void attention_narrow(const Params& params, SharedStorage& smem) {
  const CtaWork<kRows> cta(params);
  const int row0 = cta.warp_row0(params);
  const TilePart part(params, cta);
  if (threadIdx.x == 0) start_barriers(params, smem, cta.owned);
  __syncwarp();  // bases and barriers are there for the first warp
  load_first_tiles(params, smem, part);
  if (lane_id() == 0) smem.work[warp_id()] = warp_work<kRows>(params, row0, kStepKeys);
  smem.roots.template fill<kThreads>();
  smem.constants.fill();
  __syncthreads();  // these and the constants are there for all
  MmaTotals& totals = smem.totals[warp_id()];
  MmaRows rows(params, smem.bases, row0, smem.roots, smem.constants, totals);

  const auto work_on = [&](int block, const KeyTile& tile) {
    const volatile WarpWork& own = smem.work[warp_id()];
    const u32 tile_at = shared_address(&tile);
#pragma unroll 1
    for (int i = key_warp(params); i < kTileSteps; i += params.key_warps) {
      const int step = block * kTileSteps + i;
      if (step < own.steps.begin || step >= own.steps.end) continue;
      const u32 at = tile_at + i * kStepBytes, bias_at = tile_at + KeyTile::kBias + i * kStepBias;
      bool done = step >= own.steps.full_begin && step < own.steps.full_end;
      if (done)
        done = params.key_bias != nullptr ? rows.template bet_on_step<true>(params, at, bias_at)
                                          : rows.template bet_on_step<false>(params, at, bias_at);
      if (!done) rows.careful_step(params, smem.bases, own.row0, step * kStepKeys, at, bias_at);
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
