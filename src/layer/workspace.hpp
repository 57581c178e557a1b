#pragma once

#include <cstddef>
#include <memory>

#include "layer/operations.hpp"
#include "mla/device_memory.hpp"
#include "mla/layer.hpp"

namespace mla {
namespace layer {

/// Checks the options against the configuration, the device included, and returns them with the
/// rank's heads resolved: all of them where the range has count 0. Throws InvalidArgument.
LayerOptions check_options(const LayerConfig& config, const LayerOptions& options);

/// What decides the widths of a workspace; a layer refuses one that was made for another.
struct WorkspaceShape {
  int64_t num_heads = 0, q_lora_rank = 0, kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  DType dtype = DType::kBFloat16;
  Device device{};

  bool operator==(const WorkspaceShape&) const = default;
};

/// Options as check_options returns them.
WorkspaceShape workspace_shape(const LayerConfig& config, const LayerOptions& options);

}  // namespace layer

/// Every buffer of a step, [max_tokens, ...] each, and what does its work.
struct LayerWorkspace::Impl {
  /// Options as check_options returns them.
  Impl(const LayerConfig& config, const LayerOptions& options, int64_t tokens);

  int64_t max_tokens = 0;
  layer::WorkspaceShape shape;
  std::unique_ptr<layer::Operations> operations;
  DeviceMemory memory;
  float* q_latent = nullptr;      // [T, q_lora_rank], before its norm
  float* kv_latent = nullptr;     // [T, kv_lora_rank + rope], before norm and rotation
  std::byte* q_normed = nullptr;  // [T, q_lora_rank]; this and the rest of the layer's dtype
  std::byte* q = nullptr;         // [T, H, qk_head_dim]
  std::byte* q_nope = nullptr;    // [T, H, kv_lora_rank], absorbed
  std::byte* q_pe = nullptr;      // [T, H, rope]
  std::byte* latent = nullptr;    // [T, kv_lora_rank + rope], rows for the cache
  std::byte* attended = nullptr;  // [T, H, kv_lora_rank]
  std::byte* values = nullptr;    // [T, H, v_head_dim]
};

}  // namespace mla
