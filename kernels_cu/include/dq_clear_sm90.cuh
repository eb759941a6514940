// dq of blocks of query rows that see no key: 0, which no step of a backward of sm_90 writes.
#pragma once
#include "blocks.cuh"
#include "fragment.cuh"
#include "locate.cuh"

namespace cuflash {

// One warp of each CTA.
__device__ __forceinline__ void clear_dq(const Params& params) {
  if (all_rows_see_keys(params)) return;
  const int m_blocks = ceil_div(params.seqlen_q, kTile.block_m);
  for (int i = blockIdx.x; i < m_blocks * owned_count(params) * loop_count(params); i += gridDim.x) {
    const int row0 = i % m_blocks * kTile.block_m, at = i / m_blocks,
              row_end = min_of(params.seqlen_q, row0 + kTile.block_m);
    const BlockRange keys = key_blocks(params, row0, row_end, kTile.block_n);
    if (keys.end > keys.begin) continue;
    const BatchIndex batch = batch_index(params, at % owned_count(params), at / owned_count(params));
#pragma unroll 1
    for (int row = row0; row < row_end; ++row) {
      Output* dq = base<Output>(params.dq, params.dq_stride, batch) + row * params.dq_stride.row;
#pragma unroll 1
      for (int col = lane_id(); col < params.head_dim; col += 32) dq[col * params.dq_stride.col] = Output{};
    }
  }
}

}  // namespace cuflash
