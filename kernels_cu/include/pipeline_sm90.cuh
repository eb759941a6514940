// Buffers between the warp that has tiles copied and the warpgroups that multiply them.
#pragma once
#include "locate.cuh"
#include "planes.cuh"
#include "ptx/bulk.cuh"
#include "ptx/tma.cuh"

namespace cuflash {

// Of one buffer: whether it is full, by the producer's arrival and the bytes it expects, and whether it is empty again.
struct BufferBarriers {
  u64 full, empty;

  // One thread.
  __device__ __forceinline__ void start(int releases) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, releases);
  }
};

// Where a side of a ring of kStages buffers is: buffers are used in turns.
template <int kStages>
struct PipelineState {
  int stage = 0;
  u32 parity = 0;  // of the phase in which the buffer is filled

  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  // By so many, at most as many as there are.
  template <int kBuffers>
  __device__ __forceinline__ void advance() {
    static_assert(kBuffers <= kStages);
    if constexpr (kBuffers == 1) return next();
    stage += kBuffers;
    if (stage >= kStages) stage -= kStages, parity ^= 1;
  }
};

// Where a batch position is on a map, which has no axis to step along where the array is broadcast.
__device__ __forceinline__ void batch_on_map(int (&at)[3], const BatchIndex& batch, const Strides& stride) {
#pragma unroll
  for (int i = 0; i < 3; ++i) at[i] = stride.batch[i] == 0 ? 0 : batch.i[i];
}

// The producer's: the tile at `row` and `col` of a batch position, as soon as the buffer is empty. The buffer is full
// with `more_bytes` that are still to be asked for.
template <class Tile>
__device__ __forceinline__ void fill(Tile (&smem)[kPlanes], BufferBarriers& barriers, u32 parity,
                                     const TensorMap (&map)[kPlanes], int row, const BatchIndex& batch,
                                     const Strides& stride, u32 more_bytes = 0, int col = 0) {
  int at[3];
  batch_on_map(at, batch, stride);
  mbarrier_wait(barriers.empty, parity ^ 1);
  mbarrier_arrive_expect(barriers.full, sizeof(smem) + more_bytes);
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel)
      tma_load(shared_address(&smem[plane]) + panel * Tile::kPanelBytes, map[plane], barriers.full, col + 64 * panel,
               row, at);
}

// The producer's: key_bias of the keys from key0 on, a block of them or what is left. Rows of the array begin and end
// at whole 16 bytes, as the copy engine needs them: what follows the last key is brought, too.
template <int kKeys>
__device__ __forceinline__ void fill_bias(float (&smem)[kKeys], BufferBarriers& barriers, u32 parity,
                                          const Params& params, const float* row, int key0) {
  const u32 nbytes = 16 * min_of(kKeys / 4, ceil_div(params.seqlen_k - key0, 4));
  mbarrier_wait(barriers.empty, parity ^ 1);
  mbarrier_arrive_expect(barriers.full, nbytes);
  bulk_load(smem, row + key0, nbytes, barriers.full);
}

}  // namespace cuflash
