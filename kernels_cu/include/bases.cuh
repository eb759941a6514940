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

__device__ __forceinline__ Bases bases_of(const Params& params, const BatchIndex& batch) {
  return {base<Operand>(params.q, params.q_stride, batch), base<Operand>(params.k, params.k_stride, batch),
          base<Operand>(params.v, params.v_stride, batch),
          params.key_bias == nullptr ? nullptr : params.key_bias + offset(params.key_bias_stride, batch)};
}

// A feature of a query row, 0 past the caller's; rows beyond the last repeat it and are not stored.
__device__ __forceinline__ Accumulator query(const Params& params, const volatile Bases& bases, int row, int feature) {
  row = min_of(row, params.seqlen_q - 1);
  if (feature >= params.head_dim) return 0;
  return to_float(bases.q[row * params.q_stride.row + feature * params.q_stride.col]);
}

}  // namespace cuflash
