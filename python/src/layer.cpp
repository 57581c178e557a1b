#include "mla/layer.hpp"

#include <vector>

#include "attention.hpp"
#include "config.hpp"
#include "export.hpp"
#include "pool.hpp"

namespace mla::py {

namespace ffi = tvm::ffi;

/// A layer with what its workspaces need.
struct OwnedLayer {
  OwnedLayer(const LayerConfig& config, const LayerWeights& weights, const LayerOptions& with)
      : options(with), layer(config, weights, with) {}
  LayerOptions options;
  Layer layer;
};

template <>
inline constexpr const char* kTypeKey<LayerConfig> = "libmla.LayerConfig";
template <>
inline constexpr const char* kTypeKey<OwnedLayer> = "libmla.Layer";
template <>
inline constexpr const char* kTypeKey<LayerWorkspace> = "libmla.LayerWorkspace";

namespace {

using ConfigBox = Box<LayerConfig>;
using LayerBox = Box<OwnedLayer>;
using WorkspaceBox = Box<LayerWorkspace>;

ConfigBox layer_config_parse(const ffi::String& json) {
  return ConfigBox::make({}, parse_layer_config(text_of(json)));
}

/// model_type, sm_scale, then the widths in the order of LayerConfig.
ffi::Array<ffi::Any> layer_config_fields(const ConfigBox& box) {
  const LayerConfig& config = *box;
  return {ffi::String(config.model_type),
          static_cast<double>(config.sm_scale),
          config.hidden_size,
          config.num_attention_heads,
          config.q_lora_rank,
          config.kv_lora_rank,
          config.qk_nope_head_dim,
          config.qk_rope_head_dim,
          config.v_head_dim};
}

LayerOptions options_from(const Fields& heads, int64_t dtype, int64_t device_kind,
                          int64_t device_index, const ffi::Optional<ExecutorBox>& executor) {
  return {.heads = {.begin = narrow(heads[0], {"heads.begin", "Layer"}),
                    .count = narrow(heads[1], {"heads.count", "Layer"})},
          .dtype = static_cast<DType>(dtype),
          .device = device_from(device_kind, device_index),
          .executor = executor_from(executor)};
}

/// weights: those of LayerWeights in its order, or None.
LayerBox layer_make(const ConfigBox& config, const ffi::Array<ffi::Optional<ffi::Tensor>>& weights,
                    const Fields& heads, int64_t dtype, int64_t device_kind, int64_t device_index,
                    const ffi::Optional<ExecutorBox>& executor) {
  static constexpr const char* kNames[] = {
      "q_proj",         "q_a_proj",  "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa",
      "kv_a_layernorm", "kv_b_proj", "o_proj"};
  LayerWeights views;
  ConstTensor<2>* const targets[] = {&views.q_proj,
                                     &views.q_a_proj,
                                     &views.q_a_layernorm,
                                     &views.q_b_proj,
                                     &views.kv_a_proj_with_mqa,
                                     &views.kv_a_layernorm,
                                     &views.kv_b_proj,
                                     &views.o_proj};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    const ffi::Optional<ffi::Tensor> weight = weights[static_cast<int64_t>(i)];
    if (!weight.has_value()) continue;
    const ffi::Tensor tensor = *weight;
    *targets[i] = view_of<2>(ffi::TensorView(tensor), {kNames[i], "Layer"});
  }
  return LayerBox::make({}, *config, views,
                        options_from(heads, dtype, device_kind, device_index, executor));
}

LayerBox layer_from_file(const ConfigBox& config, const ffi::String& path,
                         const ffi::String& prefix, const Fields& heads, int64_t dtype,
                         int64_t device_kind, int64_t device_index,
                         const ffi::Optional<ExecutorBox>& executor) {
  const Safetensors file{std::string(path)};
  return LayerBox::make({}, *config, find_layer_weights(file, *config, text_of(prefix)),
                        options_from(heads, dtype, device_kind, device_index, executor));
}

int64_t layer_num_heads(const LayerBox& box) { return (*box).layer.num_heads(); }

WorkspaceBox layer_workspace(const LayerBox& box, int64_t max_tokens) {
  return WorkspaceBox::make({}, (*box).layer.config(), (*box).options, max_tokens);
}

int64_t workspace_bytes(const WorkspaceBox& workspace) {
  return static_cast<int64_t>((*workspace).bytes());
}

/// q_nope, q_pe, ckv, kpe, attended.
ffi::Array<ffi::Tensor> layer_project(const LayerBox& box, ffi::TensorView hidden,
                                      ffi::TensorView positions, const WorkspaceBox& workspace,
                                      int64_t stream) {
  constexpr const char* kWhere = "Layer::project";
  const LayerActivations a = (*box).layer.project(
      view_of<2>(hidden, {"hidden", kWhere}),
      typed_view_of<int32_t, 1>(positions, {"positions", kWhere}), *workspace, stream_from(stream));
  return {share(a.q_nope, workspace), share(a.q_pe, workspace), share(a.ckv, workspace),
          share(a.kpe, workspace), share(a.attended, workspace)};
}

void layer_output(const LayerBox& box, ffi::TensorView attended, ffi::TensorView out,
                  const WorkspaceBox& workspace, int64_t stream) {
  constexpr const char* kWhere = "Layer::output";
  (*box).layer.output(view_of<3>(attended, {"attended", kWhere}), view_of<2>(out, {"out", kWhere}),
                      *workspace, stream_from(stream));
}

void layer_forward(const LayerBox& box, ffi::TensorView hidden, ffi::TensorView positions,
                   ffi::TensorView slots, const PoolBox& pool, int64_t layer_idx,
                   const AttentionBox& attention, ffi::TensorView out,
                   const WorkspaceBox& workspace, int64_t stream) {
  constexpr const char* kWhere = "Layer::forward";
  (*box).layer.forward({.hidden = view_of<2>(hidden, {"hidden", kWhere}),
                        .positions = typed_view_of<int32_t, 1>(positions, {"positions", kWhere}),
                        .slots = typed_view_of<int64_t, 1>(slots, {"slots", kWhere}),
                        .pool = &*pool,
                        .layer_idx = narrow(layer_idx, {"layer_idx", kWhere}),
                        .attention = &*attention,
                        .out = view_of<2>(out, {"out", kWhere})},
                       *workspace, stream_from(stream));
}

}  // namespace

MLA_PY_EXPORT(layer_config_parse)
MLA_PY_EXPORT(layer_config_fields)
MLA_PY_EXPORT(layer_make)
MLA_PY_EXPORT(layer_from_file)
MLA_PY_EXPORT(layer_num_heads)
MLA_PY_EXPORT(layer_workspace)
MLA_PY_EXPORT(workspace_bytes)
MLA_PY_EXPORT(layer_project)
MLA_PY_EXPORT(layer_output)
MLA_PY_EXPORT(layer_forward)

}  // namespace mla::py
