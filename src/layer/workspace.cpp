#include "layer/workspace.hpp"

#include <string>

#include "core/scratch_layout.hpp"
#include "layer/cuda/operations.hpp"
#include "mla/error.hpp"

namespace mla {

LayerOptions layer::check_options(const LayerConfig& config, const LayerOptions& options) {
  const auto refuse = [](const char* what, const std::string& expected, const std::string& got) {
    throw_invalid({.what = what, .where = "LayerOptions", .expected = expected, .got = got});
  };
  check_layer_config(config);
  const bool on_cuda = options.device.kind == DeviceKind::kCuda;
  if (!on_cuda && options.device != Device{}) {
    refuse("device", "cpu, or cuda:N", to_string(options.device));
  }
  if (options.dtype != DType::kFloat32 && options.dtype != DType::kBFloat16 &&
      !(on_cuda && options.dtype == DType::kFloat16)) {
    refuse("dtype", on_cuda ? "fp32, bf16 or fp16" : "fp32 or bf16 (fp16 on a CUDA device only)",
           std::string(name_of(options.dtype)));
  }
  if (on_cuda) cuda::check_available(options.device);
  LayerOptions checked = options;
  const int32_t all = config.num_attention_heads;
  const auto [begin, count] = options.heads;
  if (begin == 0 && count == 0) {
    checked.heads = {.begin = 0, .count = all};
  } else if (begin < 0 || count < 1 || begin > all - count) {
    refuse("heads", "one or more of the layer's " + std::to_string(all),
           std::to_string(count) + " from " + std::to_string(begin));
  }
  return checked;
}

layer::WorkspaceShape layer::workspace_shape(const LayerConfig& config,
                                             const LayerOptions& options) {
  return {.num_heads = options.heads.count,
          .q_lora_rank = config.q_lora_rank,
          .kv_lora_rank = config.kv_lora_rank,
          .qk_nope_head_dim = config.qk_nope_head_dim,
          .qk_rope_head_dim = config.qk_rope_head_dim,
          .v_head_dim = config.v_head_dim,
          .dtype = options.dtype,
          .device = options.device};
}

LayerWorkspace::Impl::Impl(const LayerConfig& config, const LayerOptions& options, int64_t tokens)
    : max_tokens(tokens),
      shape(layer::workspace_shape(config, options)),
      operations(layer::make_operations(options)) {
  if (tokens < 0 || tokens > kMaxTokens) {
    throw_invalid({.what = "max_tokens",
                   .where = "LayerWorkspace",
                   .expected = "0 to " + std::to_string(kMaxTokens),
                   .got = std::to_string(tokens)});
  }
  // At most 2^31 tokens of 2^10 heads of 2^14 columns of 4 bytes: 2^57 bytes.
  const auto count = [&](int64_t columns) { return static_cast<size_t>(tokens * columns); };
  const auto element = static_cast<size_t>(size_of(shape.dtype));
  // Books all buffers and, where there is memory already, sets their addresses.
  const auto lay_out = [&](std::byte* base) {
    ScratchLayout layout;
    const auto elements = [&](std::byte*& buffer, int64_t columns) {
      const size_t at = layout.book<std::byte>(count(columns) * element);
      if (base != nullptr) buffer = base + at;
    };
    const auto floats = [&](float*& buffer, int64_t columns) {
      const size_t at = layout.book<float>(count(columns));
      if (base != nullptr) buffer = reinterpret_cast<float*>(base + at);
    };
    floats(q_latent, shape.q_lora_rank);
    floats(kv_latent, shape.kv_lora_rank + shape.qk_rope_head_dim);
    elements(q_normed, shape.q_lora_rank);
    elements(q, shape.num_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim));
    elements(q_nope, shape.num_heads * shape.kv_lora_rank);
    elements(q_pe, shape.num_heads * shape.qk_rope_head_dim);
    elements(latent, shape.kv_lora_rank + shape.qk_rope_head_dim);
    elements(attended, shape.num_heads * shape.kv_lora_rank);
    elements(values, shape.num_heads * shape.v_head_dim);
    return layout.bytes();
  };
  memory = DeviceMemory(shape.device, lay_out(nullptr));
  lay_out(static_cast<std::byte*>(memory.data()));
}

LayerWorkspace::LayerWorkspace(const LayerConfig& config, const LayerOptions& options,
                               int64_t max_tokens)
    : impl_(std::make_unique<Impl>(config, layer::check_options(config, options), max_tokens)) {}
LayerWorkspace::~LayerWorkspace() = default;
LayerWorkspace::LayerWorkspace(LayerWorkspace&&) noexcept = default;
LayerWorkspace& LayerWorkspace::operator=(LayerWorkspace&&) noexcept = default;

int64_t LayerWorkspace::max_tokens() const noexcept { return impl_->max_tokens; }
size_t LayerWorkspace::bytes() const noexcept {
  return impl_->memory.bytes() + impl_->operations->bytes();
}

}  // namespace mla
