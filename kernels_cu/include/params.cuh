// The call, as the kernels see it. cuflash/params.py holds the same layout and proves it by static_assert.
#pragma once
#include "accumulator.cuh"

namespace cuflash {

// In elements. A vector (lse, key_bias, ...) has its length on `row`. 64-bit: a batch may lie beyond 2^31 elements.
struct Strides {
  i64 batch[3], row, col;
};

enum Need : int { kNeedQ = 1, kNeedK = 2, kNeedV = 4, kNeedKeyBias = 8 };

struct Params {
  const void* q;                // (batch, seqlen_q, head_dim)
  const void* k;                // (batch, seqlen_k, head_dim)
  const void* v;                // (batch, seqlen_k, value_dim)
  const Accumulator* key_bias;  // (batch, seqlen_k) or null
  void* o;                      // (batch, seqlen_q, value_dim)
  Accumulator* lse;             // (batch, seqlen_q) or null
  const void* dout;             // (batch, seqlen_q, value_dim) or null
  const Accumulator* dlse;      // (batch, seqlen_q) or null
  Accumulator* row_lse;         // workspace (batch, seqlen_q rounded up): lse, +inf where a row has no key
  Accumulator* delta;           // workspace (batch, seqlen_q rounded up): rowsum(do * o) - dlse
  void* dq;                     // as q
  void* dk;                     // as k
  void* dv;                     // as v
  Accumulator* dkey_bias;       // as key_bias
  // Workspace of the fused backward: dq / scale in 16-row tiles of the tile head dim, in register order; for each block
  // of query rows, how many CTAs have added to it.
  Accumulator* dq_accum;
  int* dq_turn;
  // Workspace of a forward of floats on sm_90: planes of q, k and v, (planes, batch, rows, columns padded to 16 bytes).
  void* q_planes;
  void* k_planes;
  void* v_planes;
  u32* claims;  // counters, 0 before a launch: how much work has been claimed; null where that is known
  // Workspace of a forward whose keys are split: (batch, seqlen_q, 2 + value_dim, splits); of a backward on sm_90 that
  // sums dkey_bias over batch positions: (batch, seqlen_k).
  Accumulator* partials;
  void* row_terms;  // workspace, as row_lse, or null: RowTerms (row_terms_sm90.cuh)
  u32* careful;     // 0 before a call and after it: whether some row of it needs care, or null
  Strides q_stride, k_stride, v_stride, key_bias_stride, o_stride, lse_stride, dout_stride, dlse_stride, row_lse_stride,
      delta_stride, dq_stride, dk_stride, dv_stride, dkey_bias_stride, dq_accum_stride, dq_turn_stride, q_planes_stride,
      k_planes_stride, v_planes_stride;
  Accumulator scale;
  Accumulator exponent_scale;  // c: the factor from a score to the exponent of 2
  Accumulator lse_scale;       // the factor from a score to natural units
  Accumulator softcap;         // 0: none
  // Batch axes that a CTA owns (grid) and those it sums over (loop): of each axis one of the two extents is 1.
  int grid_extent0, grid_extent1, grid_extent2;
  int loop_extent0, loop_extent1, loop_extent2;
  int seqlen_q, seqlen_k;
  int head_dim, value_dim;  // the caller's; the tile's are buckets above them
  int band_lo, band_hi;     // row i sees key j iff i + band_lo <= j <= i + band_hi
  int need;                 // bits of Need
  int store_vector;         // outputs of this launch take 16-byte stores
  int splits, key_warps;    // into how many parts the grid takes the keys, and the warps of a CTA each of those
  int split_tiles;          // the last of all tiles, which alone are taken in parts, where only some are
  int section;              // batch positions whose tiles are taken together: the L2 holds what they share
  int last_section;         // of the last of them, at least
  int store_map;            // whether o has a tensor map
};

struct MergePart {
  const void* o;    // (batch, rows, value_dim)
  const void* lse;  // (batch, rows)
  Strides o_stride, lse_stride;
};

constexpr int kMergeParts = 36;

struct MergeParams {
  MergePart part[kMergeParts];  // the first alone when the parts are stacked in one array
  void* o;
  void* lse;
  i64 o_part_stride, lse_part_stride;  // elements from part to part when stacked
  Strides o_stride, lse_stride;
  int extent0, extent1, extent2, rows, value_dim, parts, stacked;
};

}  // namespace cuflash
