#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm90/attention/traits.cuh"

// What a block has to do, the same for each of its roles.
namespace mla::cuda::sm90 {

/// What one block does of a tile.
struct Work {
  int64_t row_begin, partial_begin;  // as in plan::Tile, of this block's rows
  int32_t tile;                      // its index
  int32_t request, num_rows, kv_begin, kv_end;
  int32_t num_steps;
};

// The plan and its tiles are read again where they are needed: the math groups have no registers to
// keep them in.

__device__ inline PlanView plan_of(const AttentionArgs& args) { return args.image.view(args.plan); }

/// The block's part of a tile; without rows where it has none.
template <class Traits>
__device__ inline Work work_of(const AttentionArgs& args, int32_t tile_index) {
  const plan::Tile tile = plan_of(args).tiles[tile_index];
  const int32_t num_keys = tile.kv_end - tile.kv_begin;
  const int32_t first_row = Traits::kRows * (static_cast<int32_t>(blockIdx.x) % Traits::kBlocks);
  return {.row_begin = tile.row_begin + first_row,
          .partial_begin = tile.partial_begin < 0 ? -1 : tile.partial_begin + first_row,
          .tile = tile_index,
          .request = tile.request,
          .num_rows = min(tile.num_rows - first_row, Traits::kRows),
          .kv_begin = tile.kv_begin,
          .kv_end = tile.kv_end,
          .num_steps = num_keys / Traits::kKeys + (num_keys % Traits::kKeys > 0)};
}

/// args.is_cluster, known at compile time where a worker has one block: leaves out what only a
/// cluster needs.
template <class Traits>
__device__ inline bool in_cluster(const AttentionArgs& args) {
  return Traits::kBlocks == 2 && args.is_cluster;
}

/// Calls fn(work) for every tile of this block, the same in each of its roles.
template <class Traits, class Fn>
__device__ inline void for_each_work(const AttentionArgs& args, const Fn& fn) {
  const int32_t* tiles =
      plan_of(args).worker_indptr + static_cast<int32_t>(blockIdx.x) / Traits::kBlocks;
  const int32_t end = tiles[1];
  for (int32_t t = tiles[0]; t < end; ++t) {
    const Work work = work_of<Traits>(args, t);
    // A block without rows goes along where the other one needs the keys that it brings.
    const bool has_part = work.num_rows > 0 || args.is_cluster;
    if (has_part && work.request < args.num_requests) fn(work);
  }
}

/// Where a block stands in the ring of key stages.
struct RingPlace {
  uint32_t step = 0;  // counted over all tiles

  __device__ uint32_t stage() const { return step % 2; }
  __device__ uint32_t parity() const { return step / 2 % 2; }
};

}  // namespace mla::cuda::sm90
