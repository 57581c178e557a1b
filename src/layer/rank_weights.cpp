#include "layer/rank_weights.hpp"

#include <vector>

#include "layer/checks.hpp"
#include "layer/rows.hpp"

namespace mla::layer {
namespace {

constexpr const char* kCreate = "Layer";

ConstTensor<2> checked(const char* name, const ConstTensor<2>& weight, int64_t rows,
                       int64_t columns) {
  check_rows<const void, 2>(kCreate, name, weight, {rows, columns},
                            {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, Device{});
  return weight;
}

template <class T>
DeviceMemory upload(const std::vector<T>& values, Device device) {
  DeviceMemory memory(device, values.size() * sizeof(T));
  memory.copy_from_host(values.data(), memory.bytes());
  synchronize(device);
  return memory;
}

Weight copy(const ConstTensor<2>& from, DType dtype, Device device) {
  std::vector<std::byte> rounded(
      static_cast<size_t>(from.shape[0] * from.shape[1] * size_of(dtype)));
  convert_rows(from, contiguous_view(static_cast<void*>(rounded.data()), from.shape, dtype));
  Weight weight{.memory = upload(rounded, device)};
  weight.rows =
      contiguous_view(static_cast<const void*>(weight.memory.data()), from.shape, dtype, device);
  return weight;
}

DeviceMemory copy_norm(const ConstTensor<2>& norm, double scale, Device device) {
  std::vector<float> weights(static_cast<size_t>(norm.shape[1]));
  convert_rows(norm, contiguous_view(weights.data(), norm.shape));
  for (float& weight : weights) weight = static_cast<float>(weight * scale);
  return upload(weights, device);
}

ConstTensor<2> rows_of(ConstTensor<2> view, int64_t begin, int64_t count) {
  const int64_t offset = begin * view.stride[0] * size_of(view.dtype);
  view.data = static_cast<const std::byte*>(view.data) + offset;
  view.shape[0] = count;
  return view;
}

}  // namespace

RankWeights::RankWeights(const LayerConfig& config, const LayerWeights& weights,
                         const LayerOptions& options) {
  const int64_t hidden = config.hidden_size;
  const int64_t heads = config.num_attention_heads;
  const int64_t qk = config.qk_head_dim();
  const int64_t kv = config.qk_nope_head_dim + config.v_head_dim;
  const int64_t v = config.v_head_dim;
  const auto [begin, count] = options.heads;
  const auto keep = [&](const ConstTensor<2>& rows) {
    return copy(rows, options.dtype, options.device);
  };
  const auto keep_norm = [&](const char* name, const ConstTensor<2>& weight, int64_t width,
                             double scale, DeviceMemory& memory) {
    memory = copy_norm(checked(name, weight, 1, width), scale, options.device);
    return Norm{.weights = static_cast<const float*>(memory.data()),
                .width = width,
                .eps = config.latent_norm_eps};
  };

  if (config.q_lora_rank == 0) {
    const auto whole = checked("q_proj", weights.q_proj, heads * qk, hidden);
    q_proj = keep(rows_of(whole, begin * qk, count * qk));
  } else {
    const int64_t rank = config.q_lora_rank;
    q_a_proj = keep(checked("q_a_proj", weights.q_a_proj, rank, hidden));
    q_norm = keep_norm("q_a_layernorm", weights.q_a_layernorm, rank, config.q_lora_scale, q_norm_);
    const auto whole = checked("q_b_proj", weights.q_b_proj, heads * qk, rank);
    q_b_proj = keep(rows_of(whole, begin * qk, count * qk));
  }
  const int64_t rank = config.kv_lora_rank;
  kv_a_proj = keep(checked("kv_a_proj_with_mqa", weights.kv_a_proj_with_mqa,
                           rank + config.qk_rope_head_dim, hidden));
  kv_norm =
      keep_norm("kv_a_layernorm", weights.kv_a_layernorm, rank, config.kv_lora_scale, kv_norm_);
  const auto whole_kv = checked("kv_b_proj", weights.kv_b_proj, heads * kv, rank);
  kv_b_proj = keep(rows_of(whole_kv, begin * kv, count * kv));
  const auto whole_o = checked("o_proj", weights.o_proj, hidden, heads * v);
  o_proj = keep(columns(whole_o, begin * v, count * v));

  frequencies_ = upload(rope_frequencies(config.rope, config.qk_rope_head_dim), options.device);
  rope = {.layout = config.rope.layout,
          .width = config.qk_rope_head_dim,
          .magnitude = rope_magnitude(config.rope),
          .frequencies = static_cast<const double*>(frequencies_.data())};
}

}  // namespace mla::layer
