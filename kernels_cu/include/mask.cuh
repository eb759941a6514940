// Masks by the first and the last column that a row sees: a comparison with a known number and a choice for each
// element, and once more only where a window begins in the tile.
#pragma once
#include "fragment.cuh"
#include "params.cuh"

namespace cuflash {

// Scores of rows from row0 and keys from key0 on, both the first of the warp's tile.
template <int kMTiles, int kCols>
__device__ __forceinline__ void mask_by_limits(Fragment<kMTiles, kCols>& s, const Params& params, int row0, int key0) {
  using Scores = Fragment<kMTiles, kCols>;
  const int lane_key0 = key0 + 2 * (lane_id() % 4);
  int limit[2 * kMTiles];
  Scores::for_each_row(
      [&](int r, int row) { limit[r] = min_of(row0 + row + params.band_hi, params.seqlen_k - 1) - lane_key0; });
  s.for_each_lane_column([&](Accumulator& x, int slot, int col) { x = col <= limit[slot] ? x : neg_inf(); });
  if (row0 + 16 * kMTiles - 1 + params.band_lo <= key0) return;
  Scores::for_each_row([&](int r, int row) { limit[r] = row0 + row + params.band_lo - lane_key0; });
  s.for_each_lane_column([&](Accumulator& x, int slot, int col) { x = col >= limit[slot] ? x : neg_inf(); });
}

// The same of transposed scores: of keys from key0 and query rows from row0 on, is_absent(row slot) saying which keys
// are not there whatever their number. Rows beyond the length are not masked.
template <int kCols, class IsAbsent>
__device__ __forceinline__ void mask_by_row_limits(Fragment<1, kCols>& s, const Params& params, int key0, int row0,
                                                   IsAbsent is_absent) {
  using Scores = Fragment<1, kCols>;
  const int lane_row0 = row0 + 2 * (lane_id() % 4);
  int limit[2];
  Scores::for_each_row([&](int r, int row) {
    const bool exists = key0 + row < params.seqlen_k && !is_absent(r);
    limit[r] = exists ? key0 + row - params.band_hi - lane_row0 : kCols;
  });
  s.for_each_lane_column([&](Accumulator& x, int slot, int col) { x = col >= limit[slot] ? x : neg_inf(); });
  if (key0 - params.band_lo >= row0 + kCols - 1) return;
  Scores::for_each_row([&](int r, int row) { limit[r] = key0 + row - params.band_lo - lane_row0; });
  s.for_each_lane_column([&](Accumulator& x, int slot, int col) { x = col <= limit[slot] ? x : neg_inf(); });
}
template <int kCols>
__device__ __forceinline__ void mask_by_row_limits(Fragment<1, kCols>& s, const Params& params, int key0, int row0) {
  mask_by_row_limits(s, params, key0, row0, [](int) { return false; });
}

}  // namespace cuflash
