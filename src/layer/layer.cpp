#include "mla/layer.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "layer/gemm.hpp"
#include "layer/rope.hpp"
#include "layer/rows.hpp"
#include "layer/workspace.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

using layer::AlignedBytes;
using layer::gemm;

constexpr const char* kCreate = "Layer";
constexpr const char* kProject = "Layer::project";
constexpr const char* kOutput = "Layer::output";
constexpr const char* kForward = "Layer::forward";
constexpr int64_t kMostBytes = int64_t{1} << 61;  // that one tensor may span

[[noreturn]] void refuse(const char* where, const std::string& what, const std::string& expected,
                         const std::string& got) {
  throw_invalid({.what = what, .where = where, .expected = expected, .got = got});
}

// Rows of a host tensor with contiguous columns. `wanted` lists the dtypes that will do.
template <class T, int Rank>
void check_rows(const char* where, const char* what, const TensorView<T, Rank>& tensor,
                const std::array<int64_t, Rank>& shape, std::initializer_list<DType> wanted) {
  const std::string name = what;
  if (tensor.shape != shape) {
    refuse(where, name + ".shape", to_string(shape), to_string(tensor.shape));
  }
  if (tensor.device.kind != DeviceKind::kCpu) {
    refuse(where, name + ".device", "cpu", to_string(tensor.device));
  }
  if (std::ranges::find(wanted, tensor.dtype) == wanted.end()) {
    std::string names;
    for (const DType dtype : wanted)
      names += (names.empty() ? "" : " or ") + std::string(name_of(dtype));
    refuse(where, name + ".dtype", names, std::string(name_of(tensor.dtype)));
  }
  if (tensor.empty()) return;
  if (tensor.data == nullptr) refuse(where, name + ".data", "memory", "null");
  if (shape[Rank - 1] > 1 && tensor.stride[Rank - 1] != 1) {
    refuse(where, name + ".stride[" + std::to_string(Rank - 1) + "]", "1",
           std::to_string(tensor.stride[Rank - 1]));
  }
  for (size_t d = 0; d + 1 < Rank; ++d) {
    if (shape[d] > 1 && tensor.stride[d] < shape[Rank - 1]) {
      refuse(where, name + ".stride[" + std::to_string(d) + "]",
             "at least " + std::to_string(shape[Rank - 1]) + ", the row's width",
             std::to_string(tensor.stride[d]));
    }
    int64_t bytes = 0;  // of the dimension; three of them then stay below 2^63
    if (__builtin_mul_overflow(shape[d] * 4, tensor.stride[d], &bytes) || bytes > kMostBytes) {
      refuse(where, name + ".stride[" + std::to_string(d) + "]", "a tensor within 2^61 bytes",
             std::to_string(tensor.stride[d]));
    }
  }
}

// A copy of rows or columns of a weight, in the layer's dtype, as gemm takes it.
struct Weight {
  AlignedBytes memory;
  ConstTensor<2> rows;

  ConstTensor<3> matrix() const {
    return {rows.data, {1, rows.shape[0], rows.shape[1]}, {0, rows.stride[0], 1}, {}, rows.dtype};
  }
};

Weight copy(ConstTensor<2> from, DType dtype) {
  Weight weight;
  const auto bytes = static_cast<size_t>(from.shape[0] * from.shape[1] * size_of(dtype));
  weight.memory = layer::allocate(bytes);
  const auto to = contiguous_view(static_cast<void*>(weight.memory.get()), from.shape, dtype);
  layer::convert_rows(from, to);
  weight.rows = {to.data, to.shape, to.stride, {}, dtype};
  return weight;
}

std::vector<float> scaled(const ConstTensor<2>& norm, double scale) {
  std::vector<float> weights(static_cast<size_t>(norm.shape[1]));
  layer::convert_rows(norm, contiguous_view(weights.data(), norm.shape));
  for (float& weight : weights) weight = static_cast<float>(weight * scale);
  return weights;
}

ConstTensor<2> rows_of(ConstTensor<2> view, int64_t begin, int64_t count) {
  const int64_t offset = begin * view.stride[0] * size_of(view.dtype);
  view.data = static_cast<const std::byte*>(view.data) + offset;
  view.shape[0] = count;
  return view;
}

// to = from / rms(from) * weights, one row; sums in double, rounded once.
void norm_row(const float* from, std::span<const float> weights, double eps, void* to,
              DType dtype) {
  double squares = 0;
  for (size_t c = 0; c < weights.size(); ++c) squares += double{from[c]} * from[c];
  const double mean = squares / static_cast<double>(weights.size());
  const auto scale = static_cast<float>(1 / std::sqrt(mean + eps));
  layer::with_type(dtype, [&](auto type) {
    for (size_t c = 0; c < weights.size(); ++c) {
      layer::store<decltype(type)>(to, static_cast<int64_t>(c), from[c] * scale * weights[c]);
    }
  });
}

// Calls fn(begin, end) on parts of [0, count), one for each worker of the crew.
template <class Fn>
void share(Executor& executor, int64_t count, const Fn& fn) {
  const int64_t workers = std::min<int64_t>(executor.num_threads(), count / 8);  // 8 rows: ~10 us
  if (workers <= 1) return fn(int64_t{0}, count);
  executor.run([&](int worker) {
    if (worker < workers) fn(count * worker / workers, count * (worker + 1) / workers);
  });
}

}  // namespace

struct Layer::Impl {
  LayerConfig config;
  LayerOptions options;  // heads resolved, executor set
  layer::WorkspaceShape shape;
  layer::Rope rope;
  Weight q_proj, q_a_proj, q_b_proj, kv_a_proj, kv_b_proj, o_proj;
  std::vector<float> q_norm, kv_norm;  // times the latents' scales

  Impl(const LayerConfig& wanted, const LayerWeights& weights, const LayerOptions& asked)
      : config(wanted),
        options(asked),
        shape(layer::workspace_shape(wanted, asked)),
        rope(wanted.rope, wanted.qk_rope_head_dim) {
    options.heads = layer::check_options(config, options);
    if (!options.executor) options.executor = Executor::shared();
    take(weights);
  }

  void take(const LayerWeights& weights);
  LayerWorkspace::Impl& check_workspace(const char* where, LayerWorkspace& workspace,
                                        int64_t num_tokens) const;
  void project_query(const ConstTensor<2>& hidden, const LayerWorkspace::Impl& ws) const;
  void project_latent(const ConstTensor<2>& hidden, const LayerWorkspace::Impl& ws) const;
  void turn_queries(const LayerWorkspace::Impl& ws, int64_t num_tokens) const;
  void absorb(const LayerWorkspace::Impl& ws, int64_t num_tokens) const;
  void check_out(const char* where, const Tensor<2>& out, int64_t num_tokens) const {
    check_rows<void, 2>(where, "out", out, {num_tokens, config.hidden_size},
                        {options.dtype, DType::kFloat32});
  }

  // [T, batch, width] of the layer's dtype (or fp32) in a workspace buffer.
  Tensor<3> view(void* data, int64_t tokens, int64_t batch, int64_t width) const {
    return contiguous_view(data, std::array{tokens, batch, width}, options.dtype);
  }
  Tensor<3> float_view(float* data, int64_t tokens, int64_t width) const {
    return contiguous_view(static_cast<void*>(data), std::array{tokens, int64_t{1}, width},
                           DType::kFloat32);
  }
  std::byte* at(std::byte* buffer, int64_t index) const {
    return buffer + index * size_of(options.dtype);
  }
};

void Layer::Impl::take(const LayerWeights& weights) {
  const auto checked = [](const char* name, const ConstTensor<2>& weight, int64_t rows,
                          int64_t columns) {
    check_rows<const void, 2>(kCreate, name, weight, {rows, columns},
                              {DType::kFloat32, DType::kBFloat16, DType::kFloat16});
    return weight;
  };
  const int64_t hidden = config.hidden_size;
  const int64_t heads = config.num_attention_heads;
  const int64_t qk = config.qk_head_dim();
  const int64_t kv = config.qk_nope_head_dim + config.v_head_dim;
  const int64_t v = config.v_head_dim;
  const auto [begin, count] = options.heads;
  const DType dtype = options.dtype;

  if (config.q_lora_rank == 0) {
    const auto whole = checked("q_proj", weights.q_proj, heads * qk, hidden);
    q_proj = copy(rows_of(whole, begin * qk, count * qk), dtype);
  } else {
    const int64_t rank = config.q_lora_rank;
    q_a_proj = copy(checked("q_a_proj", weights.q_a_proj, rank, hidden), dtype);
    q_norm = scaled(checked("q_a_layernorm", weights.q_a_layernorm, 1, rank), config.q_lora_scale);
    const auto whole = checked("q_b_proj", weights.q_b_proj, heads * qk, rank);
    q_b_proj = copy(rows_of(whole, begin * qk, count * qk), dtype);
  }
  const int64_t rank = config.kv_lora_rank;
  kv_a_proj = copy(checked("kv_a_proj_with_mqa", weights.kv_a_proj_with_mqa,
                           rank + config.qk_rope_head_dim, hidden),
                   dtype);
  kv_norm =
      scaled(checked("kv_a_layernorm", weights.kv_a_layernorm, 1, rank), config.kv_lora_scale);
  const auto whole_kv = checked("kv_b_proj", weights.kv_b_proj, heads * kv, rank);
  kv_b_proj = copy(rows_of(whole_kv, begin * kv, count * kv), dtype);
  const auto whole_o = checked("o_proj", weights.o_proj, hidden, heads * v);
  o_proj = copy(columns(whole_o, begin * v, count * v), dtype);
}

LayerWorkspace::Impl& Layer::Impl::check_workspace(const char* where, LayerWorkspace& workspace,
                                                   int64_t num_tokens) const {
  LayerWorkspace::Impl& ws = *workspace.impl_;
  if (ws.shape != shape) {
    refuse(where, "workspace", "one made for this layer's widths, heads and dtype", "another");
  }
  if (num_tokens > ws.max_tokens) {
    refuse(where, "tokens", "at most " + std::to_string(ws.max_tokens) + ", the workspace's room",
           std::to_string(num_tokens));
  }
  return ws;
}

// hidden -> q [T, H, qk_head_dim], before the rotation.
void Layer::Impl::project_query(const ConstTensor<2>& hidden,
                                const LayerWorkspace::Impl& ws) const {
  const int64_t tokens = hidden.shape[0];
  const ConstTensor<3> x{
      hidden.data, {tokens, 1, hidden.shape[1]}, {hidden.stride[0], 0, 1}, {}, hidden.dtype};
  const auto q = view(ws.q, tokens, 1, shape.num_heads * config.qk_head_dim());
  if (config.q_lora_rank == 0) return gemm(x, q_proj.matrix(), q, *options.executor);

  const int64_t rank = config.q_lora_rank;
  gemm(x, q_a_proj.matrix(), float_view(ws.q_latent, tokens, rank), *options.executor);
  share(*options.executor, tokens, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      norm_row(ws.q_latent + t * rank, q_norm, config.latent_norm_eps, at(ws.q_normed, t * rank),
               options.dtype);
    }
  });
  gemm(view(ws.q_normed, tokens, 1, rank), q_b_proj.matrix(), q, *options.executor);
}

// hidden -> cache rows: ckv, normed, and kpe, turned.
void Layer::Impl::project_latent(const ConstTensor<2>& hidden,
                                 const LayerWorkspace::Impl& ws) const {
  const int64_t tokens = hidden.shape[0];
  const int64_t rank = config.kv_lora_rank;
  const int64_t rope_width = config.qk_rope_head_dim;
  const ConstTensor<3> x{
      hidden.data, {tokens, 1, hidden.shape[1]}, {hidden.stride[0], 0, 1}, {}, hidden.dtype};
  gemm(x, kv_a_proj.matrix(), float_view(ws.kv_latent, tokens, rank + rope_width),
       *options.executor);
  share(*options.executor, tokens, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* row = ws.kv_latent + t * (rank + rope_width);
      norm_row(row, kv_norm, config.latent_norm_eps, at(ws.ckv, t * rank), options.dtype);
      rope.turn(row + rank, DType::kFloat32, at(ws.kpe, t * rope_width), options.dtype,
                ws.cos + t * rope.num_pairs(), ws.sin + t * rope.num_pairs());
    }
  });
}

void Layer::Impl::turn_queries(const LayerWorkspace::Impl& ws, int64_t num_tokens) const {
  if (config.qk_rope_head_dim == 0) return;
  const int64_t width = config.qk_head_dim();
  share(*options.executor, num_tokens, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * shape.num_heads; row < end * shape.num_heads; ++row) {
      const int64_t t = row / shape.num_heads;
      rope.turn(at(ws.q, row * width + config.qk_nope_head_dim), options.dtype,
                at(ws.q_pe, row * config.qk_rope_head_dim), options.dtype,
                ws.cos + t * rope.num_pairs(), ws.sin + t * rope.num_pairs());
    }
  });
}

// q_nope W_UK: kv_b_proj holds, for each head, W_UK [nope, rank] above W_UV [v, rank].
void Layer::Impl::absorb(const LayerWorkspace::Impl& ws, int64_t num_tokens) const {
  const int64_t rank = config.kv_lora_rank;
  const int64_t nope = config.qk_nope_head_dim;
  const int64_t head_stride = (nope + config.v_head_dim) * rank;
  const Tensor<3> queries = view(ws.q, num_tokens, shape.num_heads, config.qk_head_dim());
  const ConstTensor<3> w_uk{kv_b_proj.rows.data,
                            {shape.num_heads, rank, nope},
                            {head_stride, 1, rank},
                            {},
                            options.dtype};
  gemm(columns(queries, 0, nope), w_uk, view(ws.q_nope, num_tokens, shape.num_heads, rank),
       *options.executor);
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

LayerActivations Layer::project(const ConstTensor<2>& hidden, std::span<const int32_t> positions,
                                LayerWorkspace& workspace, Stream /*stream*/) const {
  const Impl& impl = *impl_;
  const int64_t tokens = hidden.shape[0];
  check_rows<const void, 2>(kProject, "hidden", hidden, {tokens, impl.config.hidden_size},
                            {impl.options.dtype});
  if (std::ssize(positions) != tokens) {
    refuse(kProject, "positions.size()", std::to_string(tokens) + " = tokens",
           std::to_string(positions.size()));
  }
  const auto negative = std::ranges::find_if(positions, [](int32_t p) { return p < 0; });
  if (negative != positions.end()) {
    refuse(kProject, "positions[" + std::to_string(negative - positions.begin()) + "]", "0 or more",
           std::to_string(*negative));
  }
  const LayerWorkspace::Impl& ws = impl.check_workspace(kProject, workspace, tokens);

  const auto heads = impl.shape.num_heads;
  const int64_t rank = impl.config.kv_lora_rank;
  const int64_t rope = impl.config.qk_rope_head_dim;
  if (tokens > 0) {
    share(*impl.options.executor, tokens, [&](int64_t begin, int64_t end) {
      impl.rope.fill(positions, begin, end, ws.cos, ws.sin);
    });
    impl.project_query(hidden, ws);
    impl.turn_queries(ws, tokens);
    impl.absorb(ws, tokens);
    impl.project_latent(hidden, ws);
  }
  const auto rows = [&](std::byte* data, int64_t width) {
    return contiguous_view(static_cast<const void*>(data), std::array{tokens, width},
                           impl.options.dtype);
  };
  return {.q_nope = impl.view(ws.q_nope, tokens, heads, rank),
          .q_pe = impl.view(ws.q_pe, tokens, heads, rope),
          .ckv = rows(ws.ckv, rank),
          .kpe = rows(ws.kpe, rope),
          .attended = impl.view(ws.attended, tokens, heads, rank)};
}

void Layer::output(const ConstTensor<3>& attended, const Tensor<2>& out, LayerWorkspace& workspace,
                   Stream /*stream*/) const {
  const Impl& impl = *impl_;
  const int64_t tokens = attended.shape[0];
  const int64_t heads = impl.shape.num_heads;
  const int64_t rank = impl.config.kv_lora_rank;
  const int64_t nope = impl.config.qk_nope_head_dim;
  const int64_t v = impl.config.v_head_dim;
  check_rows<const void, 3>(kOutput, "attended", attended, {tokens, heads, rank},
                            {impl.options.dtype});
  impl.check_out(kOutput, out, tokens);
  const LayerWorkspace::Impl& ws = impl.check_workspace(kOutput, workspace, tokens);
  if (tokens == 0) return;

  const ConstTensor<3> w_uv{static_cast<const std::byte*>(impl.kv_b_proj.rows.data) +
                                nope * rank * size_of(impl.options.dtype),
                            {heads, v, rank},
                            {(nope + v) * rank, rank, 1},
                            {},
                            impl.options.dtype};
  gemm(attended, w_uv, impl.view(ws.values, tokens, heads, v), *impl.options.executor);
  const Tensor<3> y{out.data, {tokens, 1, out.shape[1]}, {out.stride[0], 0, 1}, {}, out.dtype};
  gemm(impl.view(ws.values, tokens, 1, heads * v), impl.o_proj.matrix(), y, *impl.options.executor);
}

void Layer::forward(const LayerStep& step, LayerWorkspace& workspace, Stream stream) const {
  if (step.pool == nullptr) refuse(kForward, "pool", "a pool", "null");
  if (step.attention == nullptr) refuse(kForward, "attention", "a planned attention", "null");
  impl_->check_out(kForward, step.out, step.hidden.shape[0]);
  const LayerActivations a = project(step.hidden, step.positions, workspace, stream);
  step.pool->append(step.layer_idx, step.slots, a.ckv, a.kpe, stream);
  step.attention->run({.q_nope = a.q_nope,
                       .q_pe = a.q_pe,
                       .cache = step.pool->views(step.layer_idx),
                       .out = a.attended,
                       .lse = {}},
                      stream);
  output(a.attended, step.out, workspace, stream);
}

}  // namespace mla
