#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/grid_barrier.cuh"
#include "cuda/merge_rows.cuh"
#include "cuda/sm90/attention/attend.cuh"
#include "cuda/sm90/attention/load.cuh"
#include "cuda/sm90/attention/traits.cuh"
#include "cuda/sm90/ptx.cuh"

// Dense MLA attention for sm_90a, in the order in which it runs. Its schedule is drawn in
// docs/kernels/sm90.md. In short:
//
// - A block works through the tiles of one worker: 64 rows of a request against a range of its
//   keys, in steps of 64 keys. Three warpgroups: one loads, two multiply.
// - The output, 64 x 512 in fp32, lies in the registers of the two math groups, 256 columns each.
// - They take turns at the scores: in step s group s % 2 multiplies queries by keys, forms the
//   weights and hands them to the other through shared memory. Then both multiply the weights by
//   their half of the values, which are the first 512 columns of the same keys.
// - A step's keys are given back to the load group as soon as both have done so.
// - Where keys of a row were cut, the math groups of all blocks meet at the end and merge its
//   parts.
namespace mla::cuda::sm90 {

enum class Role { kMathLeft, kMathRight, kLoad };  // one warpgroup each

/// The math groups of all blocks, when their tiles are done: rows whose keys were cut.
template <class Traits>
__device__ inline void merge(const AttentionArgs& args, SharedStorage<Traits>& shared) {
  if (plan_of(args).num_merges == 0) return;
  const bool speaks = threadIdx.x == 0;
  named_barrier_sync(kTilesStored, Traits::kMathThreads);
  GridArrival arrival{};
  if (speaks) arrival = arrive_at_grid(PlanImage::grid_barrier(args.plan));
  const auto wait_for_parts = [&] {
    if (speaks) wait_for_grid(arrival);
    named_barrier_sync(kPartsStored, Traits::kMathThreads);
  };
  merge_share<typename Traits::MergedRows, Traits::kMathThreads / 32>(
      args, shared.pairs, shared.sums, blockIdx.x, gridDim.x, wait_for_parts,
      [] { named_barrier_sync(kPartsStored, Traits::kMathThreads); });
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_kernel(const __grid_constant__ AttentionArgs args) {
  using Storage = SharedStorage<Traits>;
  static_assert(sizeof(Storage) <= kSharedLimitBytes);
  static_assert(offsetof(Storage, keys) % kSharedAlignment == 0);
  extern __shared__ __align__(kSharedAlignment) std::byte shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Traits>*>(shared_memory);
  if (threadIdx.x == 0) {
    const uint32_t fillers = args.key_loads == KeyLoads::kBoxes ? 1 : Traits::kGroupThreads;
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      for (int half = 0; half < Traits::kHalves; ++half) {
        barrier_init(shared_address(&shared.keys_full[stage][half]), fillers);
        const uint32_t warps = args.is_cluster ? 8 : 4;  // of a group in each block that reads them
        barrier_init(shared_address(&shared.keys_free[stage][half]), warps);
      }
    }
    for (uint64_t& full : shared.weights_full) {
      barrier_init(shared_address(&full), Traits::kGroupThreads);
    }
    barrier_init(shared_address(&shared.max_full), Traits::kGroupThreads);
    barrier_init(shared_address(&shared.sums_full), Traits::kMathThreads);
    barrier_init(shared_address(&shared.queries_full), Traits::kGroupThreads);
    barrier_init(shared_address(&shared.queries_free), 4);  // warps of the last step's group
    shared.steps_asked = 0;
    fence_barrier_init();
  }
  // Before others of a cluster arrive at a block's barriers all must be there, and at the end none
  // may leave while they still do.
  const bool has_partner = in_cluster<Traits>(args);
  has_partner ? cluster_sync() : __syncthreads();
  const auto role = static_cast<Role>(threadIdx.x / Traits::kGroupThreads);
  if (role == Role::kLoad) {
    lower_registers<Traits::kLoadRegisters>();
    if (args.key_loads == KeyLoads::kBoxes) {
      load_by_boxes<Traits>(args, shared);
    } else if (args.key_loads == KeyLoads::kChunks) {
      load_by_threads<Traits, true>(args, shared);
    } else {
      load_by_threads<Traits, false>(args, shared);
    }
  } else {
    raise_registers<Traits::kMathRegisters>();
    attend<Traits>(args, role == Role::kMathLeft ? 0 : 1, shared);
    if (args.may_merge) merge<Traits>(args, shared);
  }
  if (has_partner) cluster_sync();
}

}  // namespace mla::cuda::sm90
