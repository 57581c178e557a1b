#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "core/scratch_layout.hpp"
#include "mla/layer.hpp"

namespace mla {
namespace layer {

struct AlignedDelete {
  void operator()(std::byte* memory) const {
    ::operator delete(memory, std::align_val_t{ScratchLayout::kAlignment});
  }
};
using AlignedBytes = std::unique_ptr<std::byte, AlignedDelete>;

inline AlignedBytes allocate(size_t bytes) {
  return AlignedBytes(
      static_cast<std::byte*>(::operator new(bytes, std::align_val_t{ScratchLayout::kAlignment})));
}

/// The rank's heads, all of them where the range has count 0. Throws InvalidArgument (beyond the
/// layer's heads) and checks the other options.
HeadRange check_options(const LayerConfig& config, const LayerOptions& options);

/// What decides the widths of a workspace; a layer refuses one that was made for another.
struct WorkspaceShape {
  int64_t num_heads = 0, q_lora_rank = 0, kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  DType dtype = DType::kBFloat16;

  bool operator==(const WorkspaceShape&) const = default;
};
WorkspaceShape workspace_shape(const LayerConfig& config, const LayerOptions& options);

}  // namespace layer

/// Every buffer of a step, [max_tokens, ...] each.
struct LayerWorkspace::Impl {
  Impl(const LayerConfig& config, const LayerOptions& options, int64_t tokens);

  int64_t max_tokens = 0;
  layer::WorkspaceShape shape;
  size_t bytes = 0;
  layer::AlignedBytes memory;
  float* cos = nullptr;           // [T, rope / 2]
  float* sin = nullptr;           // [T, rope / 2]
  float* q_latent = nullptr;      // [T, q_lora_rank], before its norm
  float* kv_latent = nullptr;     // [T, kv_lora_rank + rope], before norm and rotation
  std::byte* q_normed = nullptr;  // [T, q_lora_rank]; this and the rest of the layer's dtype
  std::byte* q = nullptr;         // [T, H, qk_head_dim]
  std::byte* q_nope = nullptr;    // [T, H, kv_lora_rank], absorbed
  std::byte* q_pe = nullptr;      // [T, H, rope]
  std::byte* ckv = nullptr;       // [T, kv_lora_rank]
  std::byte* kpe = nullptr;       // [T, rope]
  std::byte* attended = nullptr;  // [T, H, kv_lora_rank]
  std::byte* values = nullptr;    // [T, H, v_head_dim]
};

}  // namespace mla
