// Where the arrays of a CTA's batch position begin: worked out once and kept in shared memory, where registers are for
// better use.
#pragma once
#include "locate.cuh"
#include "ptx/convert.cuh"

namespace cuflash {

struct Bases {
  const Operand *q, *k, *v;
  const Accumulator* key_bias;  // or null
};

// Of the first position without divisions, as in locate_split_rows.
__device__ __forceinline__ Bases bases_of(const Params& params, int owned) {
  Bases bases{static_cast<const Operand*>(params.q), static_cast<const Operand*>(params.k),
              static_cast<const Operand*>(params.v), params.key_bias};
  if (owned == 0) return bases;
  const BatchIndex batch = batch_index(params, owned, 0);
  bases.q += offset(params.q_stride, batch);
  bases.k += offset(params.k_stride, batch);
  bases.v += offset(params.v_stride, batch);
  if (bases.key_bias != nullptr) bases.key_bias += offset(params.key_bias_stride, batch);
  return bases;
}

// A feature of a query row, 0 past the caller's; rows beyond the last repeat it and are not stored.
__device__ __forceinline__ Accumulator query(const Params& params, const volatile Bases& bases, int row, int feature) {
  row = min_of(row, params.seqlen_q - 1);
  if (feature >= params.head_dim) return 0;
  return to_float(bases.q[row * params.q_stride.row + feature * params.q_stride.col]);
}

}  // namespace cuflash
