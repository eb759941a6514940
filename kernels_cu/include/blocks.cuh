// Which blocks a tile visits: half-open ranges of block indices; those in [full_begin, full_end) need no mask.
#pragma once
#include "common.cuh"
#include "params.cuh"
#include "score.cuh"

namespace cuflash {

struct BlockRange {
  int begin, full_begin, full_end, end;
  __device__ __forceinline__ bool is_full(int block) const { return block >= full_begin && block < full_end; }
};

// Block range of the interval [begin, end) of which [full_begin, full_end) is seen by every row of the tile. A block
// that the length cuts is never full.
__device__ __forceinline__ BlockRange block_range(int begin, int full_begin, int full_end, int end, int block) {
  BlockRange r;
  r.begin = begin / block;
  r.end = end > begin ? ceil_div(end, block) : r.begin;
  r.full_begin = ceil_div(full_begin, block);
  r.full_end = max_of(r.full_begin, full_end / block);
  return r;
}

// Keys that rows [row_begin, row_end) see.
__device__ __forceinline__ BlockRange key_blocks(const Params& params, int row_begin, int row_end, int block_n) {
  const int n = params.seqlen_k, last = row_end - 1;
  return block_range(min_of(n, max_of(0, row_begin + params.band_lo)), max_of(0, last + params.band_lo),
                     max_of(0, min_of(n, row_begin + params.band_hi + 1)),
                     max_of(0, min_of(n, last + params.band_hi + 1)), block_n);
}

// Rows that see no key are the first ones, or the last.
__device__ __forceinline__ bool all_rows_see_keys(const Params& params) {
  return params.band_hi >= 0 && params.seqlen_q - 1 + params.band_lo < params.seqlen_k;
}

// Rows that see keys [key_begin, key_end): key - hi <= row <= key - lo.
__device__ __forceinline__ BlockRange query_blocks(const Params& params, int key_begin, int key_end, int block_m) {
  const int m = params.seqlen_q, last = key_end - 1;
  return block_range(min_of(m, max_of(0, key_begin - params.band_hi)), max_of(0, last - params.band_hi),
                     max_of(0, min_of(m, key_begin - params.band_lo + 1)),
                     max_of(0, min_of(m, last - params.band_lo + 1)), block_m);
}

}  // namespace cuflash
