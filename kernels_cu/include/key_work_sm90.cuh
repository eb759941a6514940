// What a CTA of the backward that owns keys does, tile after tile: a block of keys, and the query blocks that see it.
#pragma once
#include "blocks.cuh"
#include "locate.cuh"

namespace cuflash {

// A block of keys and the query blocks that see it, once for each batch position over which it is summed.
struct KeyWork {
  int block, owned;  // block: -1 after the last
  BlockRange rows;
  int first, steps;

  __device__ __forceinline__ void locate(const Params& params, const Work& work) {
    block = work.block;
    owned = work.owned;
    const int key0 = block * kTile.block_n;
    rows = query_blocks(params, key0, min_of(params.seqlen_k, key0 + kTile.block_n), kTile.block_m);
    first = rows.begin;
    steps = (rows.end - rows.begin) * loop_count(params);
  }
  // Of so many parts: query blocks of one batch position.
  __device__ __forceinline__ void take_part(int part, int parts) {
    const SplitBlocks own(rows.begin, rows.end - rows.begin, part, parts);
    first = rows.begin = own.begin;
    rows.end = own.end;
    steps = own.end - own.begin;
  }
};

// Where a role is in its work: query blocks from the first one on, all round, batch position after batch position.
struct Step {
  int block, summed = 0;

  __device__ __forceinline__ explicit Step(const KeyWork& work) : block(work.first) {}
  // Whether it is at another batch position.
  __device__ __forceinline__ bool next(const KeyWork& work) {
    if (++block == work.rows.end) block = work.rows.begin;
    if (block != work.first) return false;
    ++summed;
    return true;
  }
};

// The producer works out the next one while that of the tile before is still read.
constexpr int kWorks = 3;

// Where a role is among the tiles of its CTA: the record, and the phase of K and V.
struct TileState {
  int slot = 0;
  u32 parity = 0;

  __device__ __forceinline__ void next() {
    slot = slot + 1 == kWorks ? 0 : slot + 1;
    parity ^= 1;
  }
};

__device__ __forceinline__ int tile_count(const Params& params) {
  return ceil_div(params.seqlen_k, kTile.block_n) * owned_count(params);
}

}  // namespace cuflash
