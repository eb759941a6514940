// The call, as the kernels see it. cuflash/params.py holds the same layout and proves it by static_assert.
#pragma once
#include "common.cuh"

namespace cuflash {

// In elements. A vector (lse, key_bias, ...) has its length on `row`. 64-bit: a batch may lie beyond 2^31 elements.
struct Strides {
  i64 batch[3], row, col;
};

enum Need : int { kNeedQ = 1, kNeedK = 2, kNeedV = 4, kNeedKeyBias = 8 };

struct Params {
  const void* q;          // (batch, seqlen_q, head_dim)
  const void* k;          // (batch, seqlen_k, head_dim)
  const void* v;          // (batch, seqlen_k, value_dim)
  const float* key_bias;  // (batch, seqlen_k) or null
  void* o;                // (batch, seqlen_q, value_dim)
  float* lse;             // (batch, seqlen_q) or null
  const void* dout;       // (batch, seqlen_q, value_dim) or null
  const float* dlse;      // (batch, seqlen_q) or null
  float* row_lse;         // workspace (batch, seqlen_q rounded up): lse, +inf where a row has no key
  float* delta;           // workspace (batch, seqlen_q rounded up): rowsum(do * o) - dlse
  void* dq;               // as q
  void* dk;               // as k
  void* dv;               // as v
  float* dkey_bias;       // as key_bias
  float* dq_accum;  // workspace of the unordered mode: dq / scale, 16-row tiles of the tile head dim, register order
  Strides q_stride, k_stride, v_stride, key_bias_stride, o_stride, lse_stride, dout_stride, dlse_stride, row_lse_stride,
      delta_stride, dq_stride, dk_stride, dv_stride, dkey_bias_stride, dq_accum_stride;
  // Batch axes that a CTA owns (grid) and those it sums over (loop): of each axis one of the two extents is 1.
  int grid_extent0, grid_extent1, grid_extent2;
  int loop_extent0, loop_extent1, loop_extent2;
  int seqlen_q, seqlen_k;
  int head_dim, value_dim;  // the caller's; the tile's are buckets above them
  int band_lo, band_hi;     // row i sees key j iff i + band_lo <= j <= i + band_hi
  int need;                 // bits of Need
  int store_vector;         // outputs of this launch take 16-byte stores
  float scale;
  float exponent_scale;  // c: the factor from a score to the exponent of 2
  float lse_scale;       // the factor from a score to natural units
  float softcap;         // 0: none
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
