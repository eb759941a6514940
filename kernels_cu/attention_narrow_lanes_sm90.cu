// Forward for few features and many rows on sm_90, where rows of K and V lie one after the other from multiples of 16
// bytes on, and key_bias likewise: multiply-adds bound it, and lanes own rows (narrow_lanes_sm90.cuh). The work is
// shared out as in attention_narrow.cuh, but that what the rows of a warp see of a tile falls into equal parts. Tiles
// come as in attention_narrow_sm90.cu.
//
// The outline is host.py's: locate; key blocks; load q; step; finish; epilogue.
#include "narrow_lanes_sm90.cuh"

namespace cuflash {

constexpr int kThreads = 32 * kTile.warps, kLaneRows = kTile.block_m / kThreads, kWarpRows = 32 * kLaneRows;
constexpr int kFirstKeys = 16;  // whose maxima are a first reference: a guess that seldom loses
static_assert(kLaneRows * kThreads == kTile.block_m, "each lane owns whole rows");
static_assert(kKeys % (kTile.warps * kGroupKeys) == 0, "the part of each warp is whole groups");
static_assert(kFirstKeys % kGroupKeys == 0);

using Lanes = NarrowLanes<kLaneRows>;

struct alignas(128) SharedStorage {
  KeyTile tile[kStages];
  LaneTotals<kLaneRows> totals[kTile.warps];
  // What the main loop seldom needs: it has better use for registers.
  Bases bases;
  WarpWork work[kTile.warps];  // by single keys
  KeyBarriers barriers;
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the tile table counts the same bytes");

template <bool kHasValue>
__device__ __forceinline__ bool bet(const Params& params, const Lanes& lanes, const KeyRange& keys, bool full,
                                    u32 offset, Lanes::Totals totals) {
  if (!full) return lanes.template bet<true, true, kHasValue>(params, keys, offset, totals);
  return params.key_bias != nullptr ? lanes.template bet<true, false, kHasValue>(params, keys, offset, totals)
                                    : lanes.template bet<false, false, kHasValue>(params, keys, offset, totals);
}

__device__ __forceinline__ void attention_narrow_lanes(const Params& params, SharedStorage& smem) {
  const CtaWork<kWarpRows> cta(params);
  const int row0 = cta.warp_row0(params);
  const TilePart part(params, cta);
  const bool has_bias = params.key_bias != nullptr;
  if (threadIdx.x == 0) start_barriers(params, smem, cta.owned);
  if (lane_id() == 0) smem.work[warp_id()] = warp_work<kWarpRows>(params, row0, 1);
  if (!has_bias)  // where masks end, it is read all the same: there keys may not exist
    for (int i = threadIdx.x; i < kStages * kKeys; i += kThreads) smem.tile[i / kKeys].key_bias[i % kKeys] = 0;
  __syncthreads();  // bases, barriers and biases are there
  load_first_tiles(params, smem, part);
  const Lanes::Totals totals{shared_address(&smem.totals[warp_id()].x[0][lane_id()][0])};
  Lanes lanes(params, smem.bases, row0 + lane_id(), totals);

  bool sure = false;  // the last bet of this warp was won
  const auto work_on = [&](int block, const KeyTile& tile) {
    const volatile WarpWork& own = smem.work[warp_id()];
    const int own_part = key_warp(params);
    // Whole groups of what the rows see of the tile, in equal parts.
    const int seen_from = max_of(block * kKeys, own.steps.begin / kGroupKeys * kGroupKeys),
              seen_to = min_of((block + 1) * kKeys, ceil_div(own.steps.end, kGroupKeys) * kGroupKeys);
    const int groups = max_of(0, seen_to - seen_from) / kGroupKeys;
    const int share = over_key_warps(params, groups + params.key_warps - 1) * kGroupKeys;
    const int key = seen_from + own_part * share, after = min_of(seen_to, key + share), first = key - block * kKeys;
    if (key >= after) return;
    const bool full = own.steps.full_begin <= key && after <= own.steps.full_end;
    const KeyRange keys{shared_address(&tile.k[first * kFeatures]), shared_address(&tile.key_bias[first]), after - key};
    if (has_bias) {
      bool absent = true;
      for (int i = lane_id(); i < keys.count; i += 32) absent &= tile.key_bias[first + i] == neg_inf();
      if (__all_sync(kFullWarp, absent)) return;  // padding: rows that have no key before it would lose every bet
    }
    const int row = own.row0 + lane_id();
    const u32 offset = u32(key) - row - params.band_lo;
    const bool fresh = !full && lanes.is_fresh();  // rows may begin anywhere in the chunk: its first keys do not tell
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      if (attempt > 0 || !sure || fresh) {
        const bool guess = attempt == 0 && !fresh;
        sure = lanes.move_references(params, guess ? keys.first(kFirstKeys) : keys, offset, totals);
        if (!sure) break;
      }
      sure = params.value_dim > 0 ? bet<true>(params, lanes, keys, full, offset, totals)
                                  : bet<false>(params, lanes, keys, full, offset, totals);
      if (sure) return;
    }
    lanes.careful(params, smem.bases, row, key, keys, totals);
  };
  for_each_tile(params, smem, part, part.end - part.begin, work_on, [] {});  // totals are in shared memory throughout
  __syncthreads();                                                           // the totals of all warps are there
  store_results<kWarpRows>(params, smem.totals);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::kThreads, cuflash::kTile.resident)
    KERNEL(const __grid_constant__ cuflash::Params params) {
  extern __shared__ __align__(128) char smem[];
  cuflash::attention_narrow_lanes(params, *reinterpret_cast<cuflash::SharedStorage*>(smem));
}
