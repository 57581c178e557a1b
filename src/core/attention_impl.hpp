#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/plan_image.hpp"
#include "mla/attention.hpp"
#include "mla/export.hpp"
#include "plan/schedule.hpp"

namespace mla {

/// Everything that a kernel reads and writes in one run. Host-side: index arrays are on the device
/// that runs it.
struct AttentionParams {
  Geometry geometry{};
  const void* q_nope = nullptr;
  const void* q_pe = nullptr;
  const void* ckv = nullptr;
  const void* kpe = nullptr;
  void* out = nullptr;
  float* lse = nullptr;  // null where it is not wanted
  // Strides in elements.
  int64_t q_nope_token_stride = 0, q_nope_head_stride = 0;
  int64_t q_pe_token_stride = 0, q_pe_head_stride = 0;
  int64_t out_token_stride = 0, out_head_stride = 0;
  int64_t lse_token_stride = 0, lse_head_stride = 0;
  CacheStrides cache{};
  // The plan.
  const int32_t* qo_indptr = nullptr;
  const int32_t* kv_indptr = nullptr;
  const int32_t* kv_indices = nullptr;
  const int32_t* kv_len = nullptr;
  float sm_scale = 0;
  bool causal = true;
  LseBase lse_base = LseBase::kNatural;
  // Partial results of split rows: normalised output [num_partial_rows, kv_lora_rank] and natural
  // LSE [num_partial_rows].
  float* partial_out = nullptr;
  float* partial_lse = nullptr;
};

/// All of a run but the plan's contents: those are read from the image on the device when the work
/// is done, so that a captured run follows later plans.
struct AttentionLaunch {
  AttentionParams params{};  ///< the plan's part is empty
  PlanImage image{};
  /// On the device; its address never changes. Kernels write no more of it than its barrier.
  std::byte* plan = nullptr;
  Device device{};
  /// Tiles of later requests are left out (a bucket's padding that was not handed in).
  int32_t num_requests = 0;
  int32_t num_workers = 0;
  bool may_split = false;  ///< some plan within the limits has partial results
  std::byte* worker_memory =
      nullptr;  ///< num_workers blocks of worker_stride bytes, 64-byte aligned
  size_t worker_stride = 0;
  Executor* executor = nullptr;  ///< of the kernels that run on the host
};

/// What a kernel is asked to serve.
struct KernelQuery {
  Geometry geometry{};
  CacheStrides strides{};
  Device device{};
};

/// One kernel of a device's table. The first that accepts a shape serves it; every refusal has a
/// reason. Either run_tile or launch is there.
struct AttentionImpl {
  std::string_view name;
  bool capturable = false;
  /// It feeds probabilities to tensor cores in the cache's 16-bit dtype.
  bool rounds_probabilities = false;
  /// Null where the kernel serves the shape, else why not.
  const char* (*refuses)(const KernelQuery& query) = nullptr;
  plan::CostModel (*cost_model)(const KernelQuery& query) = nullptr;
  /// Null: one for each thread of the executor.
  int32_t (*num_workers)(const KernelQuery& query) = nullptr;
  /// Does once what a first launch would do. Null: nothing.
  void (*prepare)(const KernelQuery& query) = nullptr;
  /// Working memory of one worker in bytes, at most 2 MiB on the CPU. Null: none.
  size_t (*worker_bytes)(const Geometry& geometry) = nullptr;
  /// On the host: computes one tile, into out and lse, or into the partial results where
  /// tile.partial_begin >= 0. `memory` is worker_bytes() of 64-byte aligned memory whose contents
  /// do not matter.
  void (*run_tile)(const AttentionParams& params, const plan::Tile& tile,
                   std::byte* memory) = nullptr;
  /// On an accelerator: queues the whole run, merges included. Allocates and waits for nothing;
  /// what it queues can be captured.
  void (*launch)(const AttentionLaunch& launch, Stream stream) = nullptr;
};

/// The table of a device, in order of preference; empty where the library has none for it.
std::span<const AttentionImpl* const> attention_impls(DeviceKind kind);

/// The first kernel of the device's table that accepts the shape (of that name, if one is given);
/// null where none does. Exported for `mla bench --calibrate`.
MLA_API const AttentionImpl* find_impl(const KernelQuery& query, std::string_view name);

}  // namespace mla
