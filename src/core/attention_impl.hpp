#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "mla/attention.hpp"
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

/// One kernel of a device's table. The first that accepts a shape serves it; every refusal has a
/// reason.
struct AttentionImpl {
  std::string_view name;
  bool capturable = false;
  /// Null where the kernel serves the shape, else why not.
  const char* (*refuses)(const Geometry& geometry, const CacheStrides& strides) = nullptr;
  plan::CostModel (*cost_model)(const Geometry& geometry) = nullptr;
  /// Working memory of one worker in bytes, at most 2 MiB on the CPU.
  size_t (*worker_bytes)(const Geometry& geometry) = nullptr;
  /// Computes one tile: into out and lse, or into the partial results where tile.partial_begin
  /// >= 0. `memory` is worker_bytes() of 64-byte aligned memory whose contents do not matter.
  void (*run_tile)(const AttentionParams& params, const plan::Tile& tile,
                   std::byte* memory) = nullptr;
};

/// The table of a device, in order of preference; empty where the library has none for it.
std::span<const AttentionImpl* const> attention_impls(DeviceKind kind);

/// The first kernel of the device's table that accepts the shape (of that name, if one is given);
/// null where none does.
const AttentionImpl* find_impl(const Geometry& geometry, Device device, const CacheStrides& strides,
                               std::string_view name);

}  // namespace mla
