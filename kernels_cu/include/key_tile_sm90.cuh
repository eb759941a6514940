// Key tiles for few features whose rows lie one after the other: K and V as they are in memory, by the copy engine, so
// that nobody spends instructions or registers on what is on its way. The warp that is last done with a tile orders the
// next into its place: no warp waits for another.
#pragma once
#include "bases.cuh"
#include "fragment.cuh"
#include "narrow_work.cuh"
#include "ptx/bulk.cuh"

namespace cuflash {

constexpr int kFeatures = kTile.head_dim, kKeyBytes = kFeatures * int(sizeof(Operand));
constexpr int kKeys = kTile.block_n, kStages = kTile.stages;
static_assert(kTile.value_dim == kFeatures);

struct KeyTile {
  alignas(16) Operand k[kKeys * kFeatures];
  alignas(16) Operand v[kKeys * kFeatures];
  alignas(16) Accumulator key_bias[kKeys];

  static constexpr int kV = kKeys * kKeyBytes, kBias = 2 * kV;  // where the arrays begin
};

struct KeyBarriers {
  u64 full[kStages], empty[kStages];
  u32 done[kStages];  // how often a warp has been done with the stage: which one is the last of a tile
};

// Tiles [begin, end) of a CTA. They take turns in the stages.
struct TilePart {
  int begin, end;

  template <int kRows>
  __device__ __forceinline__ TilePart(const Params& params, const CtaWork<kRows>& cta) {
    const BlockRange tiles = key_blocks(params, cta.row0, min_of(cta.row0 + cta.rows, params.seqlen_q), kKeys);
    const SplitBlocks part(tiles.begin, tiles.end - tiles.begin, cta.split, params.splits);
    begin = part.begin, end = part.end;
  }
  __device__ __forceinline__ int stage(int block) const { return (block - begin) % kStages; }
  __device__ __forceinline__ u32 parity(int block) const { return (block - begin) / kStages & 1; }
};

// Of the first `elements` of an array, and `beyond` after them, what is no whole vector, by one warp. Returned are the
// bytes that the copy engine is to bring.
template <int kElements, class T>
__device__ __forceinline__ u32 fill_rest(T (&smem)[kElements], const T* gmem, int elements, T beyond) {
  const u32 bytes = elements * u32(sizeof(T)) / 16 * 16;
#pragma unroll 1
  for (int i = bytes / sizeof(T) + lane_id(); i < kElements; i += 32) smem[i] = i < elements ? gmem[i] : beyond;
  return bytes;
}

// By one warp: the copies of a tile, of V none for lse alone. Keys beyond the last are absent: zeros, with a bias of
// -inf even where there is none. `smem` has tiles, bases and barriers.
template <class Storage>
__device__ __forceinline__ void load_tile(const Params& params, Storage& smem, int block, const TilePart& part) {
  if (block >= part.end) return;
  const volatile Bases& bases = smem.bases;
  const bool has_value = params.value_dim > 0, has_bias = params.key_bias != nullptr;
  const int key0 = block * kKeys, keys = min_of(kKeys, params.seqlen_k - key0);
  const Operand *k = bases.k + i64(key0) * kFeatures, *v = bases.v + i64(key0) * kFeatures;
  const Accumulator* key_bias = bases.key_bias + key0;
  KeyTile& tile = smem.tile[part.stage(block)];
  u64& full = smem.barriers.full[part.stage(block)];
  u32 k_bytes = sizeof(tile.k), v_bytes = has_value ? sizeof(tile.v) : 0,
      bias_bytes = has_bias ? sizeof(tile.key_bias) : 0;
  if (keys < kKeys) {
    k_bytes = fill_rest(tile.k, k, keys * kFeatures, Operand{});
    if (has_value) v_bytes = fill_rest(tile.v, v, keys * kFeatures, Operand{});
    if (has_bias) bias_bytes = fill_rest(tile.key_bias, key_bias, keys, Accumulator(neg_inf()));
#pragma unroll 1
    for (int i = keys + lane_id(); !has_bias && i < kKeys; i += 32) tile.key_bias[i] = neg_inf();
  }
  if (lane_id() != 0) return mbarrier_arrive(full);  // what this lane has filled in is there
  mbarrier_arrive_expect(full, k_bytes + v_bytes + bias_bytes);
  if (k_bytes > 0) bulk_load(tile.k, k, k_bytes, full);
  if (v_bytes > 0) bulk_load(tile.v, v, v_bytes, full);
  if (bias_bytes > 0) bulk_load(tile.key_bias, key_bias, bias_bytes, full);
}

// One thread: bases and barriers.
template <class Storage>
__device__ __forceinline__ void start_barriers(const Params& params, Storage& smem, int owned) {
  smem.bases = bases_of(params, owned);
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(smem.barriers.full[i], 32);
    mbarrier_init(smem.barriers.empty[i], 32 * kTile.warps);
    smem.barriers.done[i] = 0;
  }
  mbarrier_publish();
}

// By the first warp, once bases and barriers are there.
template <class Storage>
__device__ __forceinline__ void load_first_tiles(const Params& params, Storage& smem, const TilePart& part) {
  if (warp_id() != 0) return;
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) load_tile(params, smem, part.begin + i, part);
}

// Returns when the tile is there.
template <class Storage>
__device__ __forceinline__ void await_tile(const Storage& smem, int block, const TilePart& part) {
  mbarrier_wait(smem.barriers.full[part.stage(block)], part.parity(block));
}

// By whole warps, each of which is done with the tile: the last of them orders the next one into its place.
template <class Storage>
__device__ __forceinline__ void release_tile(const Params& params, Storage& smem, int block, const TilePart& part) {
  KeyBarriers& barriers = smem.barriers;
  const int stage = part.stage(block);
  mbarrier_arrive(barriers.empty[stage]);
  u32 done = 0;
  __syncwarp();  // all lanes have arrived
  if (lane_id() == 0) done = atomicAdd(&barriers.done[stage], 1);
  if (__shfl_sync(kFullWarp, done, 0) % kTile.warps != kTile.warps - 1) return;
  mbarrier_wait(barriers.empty[stage], part.parity(block));  // which it is: what other warps have read may be written
  load_tile(params, smem, block + kStages, part);
}

// Tile after tile of a part: work(block, tile) by each warp, and after every `often` tiles and the last one flush(). It
// comes after the first tile, too: while other warps have work, the time goes unnoticed that it takes to fetch its
// instructions.
template <class Storage, class Work, class Flush>
__device__ __forceinline__ void for_each_tile(const Params& params, Storage& smem, const TilePart& part, int often,
                                              Work work, Flush flush) {
  int flushed = part.begin + 1 - often;
#pragma unroll 1
  for (int block = part.begin;; ++block) {
    const bool ends = block >= part.end;
    if (ends || block - flushed >= often) flushed = block, flush();
    if (ends) return;
    await_tile(smem, block, part);
    work(block, smem.tile[part.stage(block)]);
    release_tile(params, smem, block, part);
  }
}

}  // namespace cuflash
