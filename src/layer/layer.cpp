#include "mla/layer.hpp"

#include <string>

#include "layer/checks.hpp"
#include "layer/rank_weights.hpp"
#include "layer/workspace.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

using layer::check_list;
using layer::check_rows;
using layer::LatentRows;
using layer::refuse;

constexpr const char* kProject = "Layer::project";
constexpr const char* kOutput = "Layer::output";
constexpr const char* kForward = "Layer::forward";

// [T, width] as [T, 1, width], which gemm takes.
template <class T>
TensorView<T, 3> one_matrix(const TensorView<T, 2>& rows) {
  return {rows.data,
          {rows.shape[0], 1, rows.shape[1]},
          {rows.stride[0], 0, 1},
          rows.device,
          rows.dtype};
}

Tensor<2> rows_of(const Tensor<3>& view) {
  return {view.data, {view.shape[0], view.shape[2]}, {view.stride[0], 1}, view.device, view.dtype};
}

}  // namespace

struct Layer::Impl {
  LayerConfig config;
  LayerOptions options;  // heads resolved
  layer::WorkspaceShape shape;
  layer::RankWeights weights;

  Impl(const LayerConfig& wanted, const LayerWeights& given, const LayerOptions& asked)
      : config(wanted),
        options(layer::check_options(wanted, asked)),
        shape(layer::workspace_shape(config, options)),
        weights(config, given, options) {}

  void check_input(const char* where, const ConstTensor<2>& hidden,
                   const TensorView<const int32_t, 1>& positions) const;
  void check_out(const char* where, const Tensor<2>& out, int64_t num_tokens) const {
    check_rows<void, 2>(where, "out", out, {num_tokens, config.hidden_size},
                        {options.dtype, DType::kFloat32}, options.device);
  }
  void check_pool(const LatentPool& pool) const;
  const LayerWorkspace::Impl& check_workspace(const char* where, const LayerWorkspace& workspace,
                                              int64_t num_tokens) const;

  void project(const ConstTensor<2>& hidden, const int32_t* positions, const LatentRows& rows,
               const LayerWorkspace::Impl& ws, Stream stream) const;
  void project_query(const ConstTensor<2>& hidden, const LayerWorkspace::Impl& ws,
                     Stream stream) const;
  void absorb(const Tensor<3>& queries, const LayerWorkspace::Impl& ws, Stream stream) const;
  LayerActivations activations(const LayerWorkspace::Impl& ws, int64_t num_tokens) const;

  // [T, batch, width] of the layer's dtype in a workspace buffer, and [T, width] of fp32.
  Tensor<3> view(void* data, int64_t tokens, int64_t batch, int64_t width) const {
    return contiguous_view(data, std::array{tokens, batch, width}, options.dtype, options.device);
  }
  TensorView<float, 2> latents(float* data, int64_t tokens, int64_t width) const {
    return contiguous_view(data, std::array{tokens, width}, options.device);
  }
};

void Layer::Impl::check_input(const char* where, const ConstTensor<2>& hidden,
                              const TensorView<const int32_t, 1>& positions) const {
  check_rows<const void, 2>(where, "hidden", hidden, {hidden.shape[0], config.hidden_size},
                            {options.dtype}, options.device);
  check_list(where, "positions", positions, hidden.shape[0], options.device, "0 or more",
             [](int32_t position) { return position >= 0; });
}

void Layer::Impl::check_pool(const LatentPool& pool) const {
  const auto text = [](int64_t rank, int64_t rope, DType dtype, Device device) {
    return std::to_string(rank) + " + " + std::to_string(rope) + " columns of " +
           std::string(name_of(dtype)) + " on " + to_string(device);
  };
  const PoolConfig& got = pool.config();
  if (got.kv_lora_rank == config.kv_lora_rank && got.dtype == options.dtype &&
      got.qk_rope_head_dim == config.qk_rope_head_dim && got.device == options.device) {
    return;
  }
  refuse(kForward, "pool",
         text(config.kv_lora_rank, config.qk_rope_head_dim, options.dtype, options.device),
         text(got.kv_lora_rank, got.qk_rope_head_dim, got.dtype, got.device));
}

const LayerWorkspace::Impl& Layer::Impl::check_workspace(const char* where,
                                                         const LayerWorkspace& workspace,
                                                         int64_t num_tokens) const {
  const LayerWorkspace::Impl& ws = *workspace.impl_;
  if (ws.shape != shape) {
    refuse(where, "workspace", "one made for this layer's widths, heads, dtype and device",
           "another");
  }
  if (num_tokens > ws.max_tokens) {
    refuse(where, "tokens", "at most " + std::to_string(ws.max_tokens) + ", the workspace's room",
           std::to_string(num_tokens));
  }
  return ws;
}

// hidden -> queries in the workspace and cache rows in `rows`.
void Layer::Impl::project(const ConstTensor<2>& hidden, const int32_t* positions,
                          const LatentRows& rows, const LayerWorkspace::Impl& ws,
                          Stream stream) const {
  const int64_t tokens = hidden.shape[0];
  if (tokens == 0) return;
  const int64_t rope_width = config.qk_rope_head_dim;
  project_query(hidden, ws, stream);
  const auto queries = view(ws.q, tokens, shape.num_heads, config.qk_head_dim());
  if (rope_width > 0) {
    ws.operations->turn_queries(columns(queries, config.qk_nope_head_dim, rope_width), positions,
                                weights.rope, view(ws.q_pe, tokens, shape.num_heads, rope_width),
                                stream);
  }
  absorb(queries, ws, stream);

  const auto latent = latents(ws.kv_latent, tokens, config.kv_lora_rank + rope_width);
  ws.operations->gemm(one_matrix(hidden), weights.kv_a_proj.matrix(), one_matrix<void>(latent),
                      stream);
  ws.operations->store_latents(TensorView<const float, 2>(latent), positions, weights.kv_norm,
                               weights.rope, rows, stream);
}

// hidden -> q [T, H, qk_head_dim], before the rotation.
void Layer::Impl::project_query(const ConstTensor<2>& hidden, const LayerWorkspace::Impl& ws,
                                Stream stream) const {
  const int64_t tokens = hidden.shape[0];
  const auto q = view(ws.q, tokens, 1, shape.num_heads * config.qk_head_dim());
  if (config.q_lora_rank == 0) {
    return ws.operations->gemm(one_matrix(hidden), weights.q_proj.matrix(), q, stream);
  }
  const auto latent = latents(ws.q_latent, tokens, config.q_lora_rank);
  const auto normed = view(ws.q_normed, tokens, 1, config.q_lora_rank);
  ws.operations->gemm(one_matrix(hidden), weights.q_a_proj.matrix(), one_matrix<void>(latent),
                      stream);
  ws.operations->norm_rows(TensorView<const float, 2>(latent), weights.q_norm, rows_of(normed),
                           stream);
  ws.operations->gemm(normed, weights.q_b_proj.matrix(), q, stream);
}

// q_nope W_UK: kv_b_proj holds, for each head, W_UK [nope, rank] above W_UV [v, rank].
void Layer::Impl::absorb(const Tensor<3>& queries, const LayerWorkspace::Impl& ws,
                         Stream stream) const {
  const int64_t rank = config.kv_lora_rank;
  const int64_t nope = config.qk_nope_head_dim;
  const ConstTensor<3> w_uk{weights.kv_b_proj.rows.data,
                            {shape.num_heads, rank, nope},
                            {(nope + config.v_head_dim) * rank, 1, rank},
                            options.device,
                            options.dtype};
  ws.operations->gemm(columns(queries, 0, nope), w_uk,
                      view(ws.q_nope, queries.shape[0], shape.num_heads, rank), stream);
}

LayerActivations Layer::Impl::activations(const LayerWorkspace::Impl& ws,
                                          int64_t num_tokens) const {
  const int64_t rank = config.kv_lora_rank;
  const int64_t rope = config.qk_rope_head_dim;
  const ConstTensor<2> rows = rows_of(view(ws.latent, num_tokens, 1, rank + rope));
  return {.q_nope = view(ws.q_nope, num_tokens, shape.num_heads, rank),
          .q_pe = view(ws.q_pe, num_tokens, shape.num_heads, rope),
          .ckv = columns(rows, 0, rank),
          .kpe = columns(rows, rank, rope),
          .attended = view(ws.attended, num_tokens, shape.num_heads, rank)};
}

Layer::Layer(const LayerConfig& config, const LayerWeights& weights, const LayerOptions& options)
    : impl_(std::make_unique<Impl>(config, weights, options)) {}
Layer::~Layer() = default;
Layer::Layer(Layer&&) noexcept = default;
Layer& Layer::operator=(Layer&&) noexcept = default;

const LayerConfig& Layer::config() const noexcept { return impl_->config; }
int32_t Layer::num_heads() const noexcept { return impl_->options.heads.count; }

Geometry Layer::geometry(int32_t page_size) const noexcept {
  return {.num_heads = num_heads(),
          .kv_lora_rank = impl_->config.kv_lora_rank,
          .qk_rope_head_dim = impl_->config.qk_rope_head_dim,
          .page_size = page_size,
          .dtype = impl_->options.dtype,
          .kv_dtype = impl_->options.dtype};
}

LayerActivations Layer::project(const ConstTensor<2>& hidden,
                                const TensorView<const int32_t, 1>& positions,
                                LayerWorkspace& workspace, Stream stream) const {
  const int64_t tokens = hidden.shape[0];
  impl_->check_input(kProject, hidden, positions);
  const LayerWorkspace::Impl& ws = impl_->check_workspace(kProject, workspace, tokens);
  const LatentRows rows{.data = ws.latent, .num_rows = tokens, .dtype = impl_->options.dtype};
  impl_->project(hidden, positions.data, rows, ws, stream);
  return impl_->activations(ws, tokens);
}

void Layer::output(const ConstTensor<3>& attended, const Tensor<2>& out, LayerWorkspace& workspace,
                   Stream stream) const {
  const Impl& impl = *impl_;
  const int64_t tokens = attended.shape[0];
  const int64_t heads = impl.shape.num_heads;
  const int64_t rank = impl.config.kv_lora_rank;
  const int64_t nope = impl.config.qk_nope_head_dim;
  const int64_t v = impl.config.v_head_dim;
  check_rows<const void, 3>(kOutput, "attended", attended, {tokens, heads, rank},
                            {impl.options.dtype}, impl.options.device);
  impl.check_out(kOutput, out, tokens);
  const LayerWorkspace::Impl& ws = impl.check_workspace(kOutput, workspace, tokens);
  if (tokens == 0) return;

  const ConstTensor<3> w_uv{static_cast<const std::byte*>(impl.weights.kv_b_proj.rows.data) +
                                nope * rank * size_of(impl.options.dtype),
                            {heads, v, rank},
                            {(nope + v) * rank, rank, 1},
                            impl.options.device,
                            impl.options.dtype};
  ws.operations->gemm(attended, w_uv, impl.view(ws.values, tokens, heads, v), stream);
  ws.operations->gemm(impl.view(ws.values, tokens, 1, heads * v), impl.weights.o_proj.matrix(),
                      one_matrix(out), stream);
}

void Layer::forward(const LayerStep& step, LayerWorkspace& workspace, Stream stream) const {
  if (step.pool == nullptr) refuse(kForward, "pool", "a pool", "null");
  if (step.attention == nullptr) refuse(kForward, "attention", "a planned attention", "null");
  const int64_t tokens = step.hidden.shape[0];
  impl_->check_input(kForward, step.hidden, step.positions);
  impl_->check_out(kForward, step.out, tokens);
  impl_->check_pool(*step.pool);
  const Tensor<3> cache = step.pool->layer(step.layer_idx);
  const int64_t num_slots = cache.shape[0] * cache.shape[1];
  check_list(kForward, "slots", step.slots, tokens, impl_->options.device,
             "-1 to " + std::to_string(num_slots - 1),
             [num_slots](int64_t slot) { return slot >= -1 && slot < num_slots; });
  const LayerWorkspace::Impl& ws = impl_->check_workspace(kForward, workspace, tokens);

  const LatentRows rows{
      .data = cache.data, .num_rows = num_slots, .dtype = cache.dtype, .slots = step.slots.data};
  impl_->project(step.hidden, step.positions.data, rows, ws, stream);
  const LayerActivations a = impl_->activations(ws, tokens);
  step.attention->run({.q_nope = a.q_nope,
                       .q_pe = a.q_pe,
                       .cache = step.pool->views(step.layer_idx),
                       .out = a.attended,
                       .lse = {}},
                      stream);
  output(a.attended, step.out, workspace, stream);
}

}  // namespace mla
