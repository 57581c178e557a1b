#include "cases/layer_case.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "cases/random.hpp"
#include "mla/device_memory.hpp"
#include "mla/error.hpp"
#include "mla/kv_resource.hpp"

namespace mla::cases {
namespace {

constexpr int32_t kLayerIdx = 1;                         // of two in the pool
constexpr int32_t kChunkSizes[] = {7, 1, 19, 2, 33, 5};  // not in step with any page size
constexpr int64_t kSamples = 64;                         // of queries, and of each one's keys
constexpr double kRounding = 0.425;  // root mean square of a rounding, in units of its dtype

[[noreturn]] void refuse(const std::string& what, const std::string& expected,
                         const std::string& got) {
  throw_invalid({.what = what, .where = "LayerFile", .expected = expected, .got = got});
}

const std::string& metadata(const Safetensors& file, const char* key) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end()) refuse(file.name(), std::string("metadata ") + key, "none");
  return found->second;
}

float element(const ConstTensor<2>& rows, int64_t index) {
  const auto read = [&](auto value) {
    std::memcpy(&value, static_cast<const std::byte*>(rows.data) + index * int64_t{sizeof(value)},
                sizeof(value));
    return static_cast<float>(value);
  };
  if (rows.dtype == DType::kBFloat16) return read(BFloat16{});
  if (rows.dtype == DType::kFloat16) return read(Float16{});
  return read(float{});
}

std::vector<float> floats(const Safetensors& file, const char* tensor, int64_t width) {
  const ConstTensor<2> rows = file.matrix(tensor);
  if (rows.shape[1] != width) {
    refuse(std::string(tensor) + ".shape[1]", std::to_string(width) + " = hidden_size",
           std::to_string(rows.shape[1]));
  }
  std::vector<float> values(static_cast<size_t>(rows.shape[0] * width));
  for (size_t i = 0; i < values.size(); ++i) values[i] = element(rows, static_cast<int64_t>(i));
  return values;
}

double read_scaling(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !(value > 0)) {
    refuse("metadata scaling", "a positive number", text);
  }
  return value;
}

double root_mean_square(std::span<const float> values) {
  double squares = 0;
  for (const float value : values) squares += double{value} * value;
  return std::sqrt(squares / static_cast<double>(values.size()));
}

// Rows in the run's dtype, rounded to nearest even, on the host and on the run's device.
class Elements {
 public:
  Elements(DType dtype, int64_t rows, int64_t width, Device device)
      : bytes_(static_cast<size_t>(rows * width * size_of(dtype))),
        memory_(device, bytes_.size()),
        view_(contiguous_view(memory_.data(), std::array{rows, width}, dtype, device)) {}

  const Tensor<2>& view() const { return view_; }
  void copy_to_device(Stream stream) {
    memory_.copy_from_host(bytes_.data(), bytes_.size(), stream);
  }
  void copy_to_host(Stream stream) { memory_.copy_to_host(bytes_.data(), bytes_.size(), stream); }

  void set_row(int64_t row, std::span<const float> values) {
    for (int64_t c = 0; c < view_.shape[1]; ++c) {
      const float value = values[static_cast<size_t>(c)];
      const int64_t index = row * view_.shape[1] + c;
      if (view_.dtype == DType::kFloat32) {
        put(index, value);
      } else if (view_.dtype == DType::kFloat16) {
        put(index, Float16(value));
      } else {
        put(index, BFloat16(value));
      }
    }
  }
  void get_row(int64_t row, std::span<float> values) const {
    const ConstTensor<2> on_host =
        contiguous_view(static_cast<const void*>(bytes_.data()), view_.shape, view_.dtype);
    for (int64_t c = 0; c < view_.shape[1]; ++c) {
      values[static_cast<size_t>(c)] = element(on_host, row * view_.shape[1] + c);
    }
  }

 private:
  template <class T>
  void put(int64_t index, T value) {
    std::memcpy(bytes_.data() + static_cast<size_t>(index) * sizeof(T), &value, sizeof(T));
  }

  std::vector<std::byte> bytes_;
  DeviceMemory memory_;
  Tensor<2> view_;
};

// Numbers that the host gives to a step.
template <class T>
class List {
 public:
  List(std::span<const T> values, Device device, Stream stream)
      : memory_(device, values.size_bytes()), count_(std::ssize(values)) {
    memory_.copy_from_host(values.data(), values.size_bytes(), stream);
  }
  TensorView<const T, 1> view() const {
    return contiguous_view(static_cast<const T*>(memory_.data()), std::array{count_},
                           memory_.device());
  }

 private:
  DeviceMemory memory_;
  int64_t count_;
};

struct Extent {
  int32_t num_requests = 0;
  int64_t most_tokens = 0;  // of one step
};

Extent extent_of(const LayerSchedule& schedule) {
  Extent extent;
  for (const auto& spans : schedule) {
    int64_t tokens = 0;
    for (const LayerSpan& span : spans) {
      extent.num_requests = std::max(extent.num_requests, span.request + 1);
      tokens += span.num_tokens;
    }
    extent.most_tokens = std::max(extent.most_tokens, tokens);
  }
  return extent;
}

void plan_step(KvResource& kv, const std::vector<LayerSpan>& spans, Stream stream) {
  std::vector<Segment> segments;
  segments.reserve(spans.size());
  for (const LayerSpan& span : spans) {
    segments.push_back({.request = static_cast<RequestId>(span.request), .span = span.num_tokens});
  }
  if (!kv.admit(segments)) {
    throw_state({.what = "schedule",
                 .where = "run_layer",
                 .expected = "no more tokens of a request than the file has",
                 .got = "pages short"});
  }
  kv.plan(stream);
}

std::vector<int32_t> positions_of(const LabelPlan& step) {
  std::vector<int32_t> positions;
  for (const KvView& view : step.views) {
    for (int64_t i = view.start; i < view.length; ++i) {
      positions.push_back(static_cast<int32_t>(i));
    }
  }
  return positions;
}

template <class Floats>
auto row_at(Floats& values, int64_t row, int64_t width) {
  return std::span(values).subspan(static_cast<size_t>(row * width), static_cast<size_t>(width));
}

}  // namespace

LayerFile::LayerFile(const std::string& path)
    : file(path),
      config(parse_layer_config(metadata(file, "config"))),
      weights(find_layer_weights(file, config)),
      scaling(read_scaling(metadata(file, "scaling"))),
      hidden(floats(file, "hidden_states", config.hidden_size)),
      expected(floats(file, "attn_output", config.hidden_size)) {
  if (const std::string& named = metadata(file, "model_type"); named != config.model_type) {
    refuse(path + ": metadata model_type", config.model_type + ", as its config says", named);
  }
  num_tokens = std::ssize(hidden) / config.hidden_size;
  if (num_tokens == 0 || hidden.size() != expected.size()) {
    refuse(path + ": attn_output.shape[0]",
           std::to_string(num_tokens) + " = rows of hidden_states, 1 or more",
           std::to_string(std::ssize(expected) / config.hidden_size));
  }
  if (!std::isfinite(output_std()) || output_std() == 0) {
    refuse(path + ": attn_output", "finite outputs that are not all 0", "others");
  }
}

double LayerFile::output_std() const {
  const auto count = static_cast<double>(expected.size());
  const double mean = std::accumulate(expected.begin(), expected.end(), 0.0) / count;
  double squares = 0;
  for (const float value : expected) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / count);
}

double LayerFile::largest_row() const {
  double largest = 0;
  const auto width = static_cast<size_t>(config.hidden_size);
  for (size_t begin = 0; begin < expected.size(); begin += width) {
    largest = std::max(largest, root_mean_square(std::span(expected).subspan(begin, width)));
  }
  return largest / output_std();
}

double LayerFile::score_rms() const {
  const LayerOptions options{.heads = {}, .dtype = DType::kFloat32, .device = {}, .executor = {}};
  const Layer layer(config, weights, options);
  LayerWorkspace workspace(config, options, num_tokens);
  std::vector<int32_t> positions(static_cast<size_t>(num_tokens));
  std::iota(positions.begin(), positions.end(), 0);
  const TensorView<const float, 2> rows =
      contiguous_view(hidden.data(), std::array{num_tokens, int64_t{config.hidden_size}});
  const LayerActivations a = layer.project(
      rows, contiguous_view(std::as_const(positions).data(), std::array{num_tokens}), workspace);

  const auto dot = [](const auto& query, int64_t t, int64_t h, const ConstTensor<2>& key,
                      int64_t k) {
    const float* x =
        static_cast<const float*>(query.data) + t * query.stride[0] + h * query.stride[1];
    const float* y = static_cast<const float*>(key.data) + k * key.stride[0];
    return std::inner_product(x, x + key.shape[1], y, 0.0);
  };
  double squares = 0;
  int64_t count = 0;
  for (int64_t t = 0; t < num_tokens; t += 1 + num_tokens / kSamples) {
    for (int64_t k = 0; k <= t; k += 1 + t / kSamples) {
      for (int64_t h = 0; h < config.num_attention_heads; ++h, ++count) {
        const double score =
            config.sm_scale * (dot(a.q_nope, t, h, a.ckv, k) + dot(a.q_pe, t, h, a.kpe, k));
        squares += score * score;
      }
    }
  }
  return std::sqrt(squares / static_cast<double>(count));
}

LayerSchedule one_pass(const LayerFile& file) {
  return {{{.request = 0, .num_tokens = static_cast<int32_t>(file.num_tokens)}}};
}

LayerSchedule in_chunks(const LayerFile& file) {
  LayerSchedule schedule;
  auto left = static_cast<int32_t>(file.num_tokens);
  for (size_t i = 0; left > 0; ++i) {
    const int32_t size = std::min(left, kChunkSizes[i % std::size(kChunkSizes)]);
    schedule.push_back({{.request = 0, .num_tokens = size}});
    left -= size;
  }
  return schedule;
}

LayerSchedule token_by_token(const LayerFile& file) {
  return LayerSchedule(static_cast<size_t>(file.num_tokens), {{.request = 0, .num_tokens = 1}});
}

LayerSchedule interleaved(const LayerFile& file, int32_t num_requests, uint64_t seed) {
  std::vector<int32_t> left(static_cast<size_t>(num_requests),
                            static_cast<int32_t>(file.num_tokens));
  LayerSchedule schedule;
  for (uint64_t step = 0; std::ranges::any_of(left, [](int32_t n) { return n > 0; }); ++step) {
    std::vector<LayerSpan> spans;
    const uint64_t key = row_key(seed, 0, step);
    for (int32_t i = 0; i < num_requests; ++i) {
      const auto request =
          static_cast<int32_t>((step + static_cast<uint64_t>(i)) %
                               static_cast<uint64_t>(num_requests));  // the order changes
      int32_t& rest = left[static_cast<size_t>(request)];
      const uint32_t bits = random_bits(key, static_cast<uint32_t>(request));
      if (rest == 0 || bits % 4 == 0) continue;  // some sit a step out
      const uint32_t chunk = bits % 3 == 0 ? 1 + bits / 16 % 40 : 1;
      spans.push_back(
          {.request = request, .num_tokens = std::min(rest, static_cast<int32_t>(chunk))});
      rest -= spans.back().num_tokens;
    }
    if (!spans.empty()) schedule.push_back(std::move(spans));
  }
  return schedule;
}

std::vector<std::vector<float>> run_layer(const LayerFile& file, const LayerRun& run,
                                          const LayerSchedule& schedule) {
  const Extent extent = extent_of(schedule);
  const int64_t width = file.config.hidden_size;
  const int64_t pages_each = (file.num_tokens + run.page_size - 1) / run.page_size;
  const LayerOptions options{
      .heads = run.heads, .dtype = run.dtype, .device = run.device, .executor = run.executor};
  const Layer layer(file.config, file.weights, options);
  LayerWorkspace workspace(file.config, options, extent.most_tokens);
  const DeviceStream stream(run.device);

  PoolConfig pool_config{.num_layers = 2,
                         .num_pages = pages_each * extent.num_requests,
                         .page_size = run.page_size,
                         .kv_lora_rank = file.config.kv_lora_rank,
                         .qk_rope_head_dim = file.config.qk_rope_head_dim,
                         .dtype = run.dtype,
                         .device = run.device,
                         .memory = {}};
  DeviceMemory memory(run.device, LatentPool::bytes(pool_config));
  memory.fill(0xff, stream);  // NaN in every dtype
  pool_config.memory = {static_cast<std::byte*>(memory.data()), memory.bytes()};
  LatentPool pool(pool_config);
  AttentionConfig attention_config;
  attention_config.geometry = layer.geometry(run.page_size);
  attention_config.num_pages = pool.total_pages();
  attention_config.device = run.device;
  attention_config.limits = {.max_rows = extent.num_requests,
                             .max_tokens = extent.most_tokens,
                             .max_listed_pages = pool_config.num_pages};
  attention_config.kernel = run.kernel;
  attention_config.executor = run.executor;
  PagedAttention attention(attention_config);

  KvResource kv(pool);
  for (int32_t request = 0; request < extent.num_requests; ++request) {
    kv.open({.request = static_cast<RequestId>(request)});
  }
  std::vector<std::vector<float>> outputs(
      static_cast<size_t>(extent.num_requests),
      std::vector<float>(file.expected.size(), std::numeric_limits<float>::quiet_NaN()));
  for (const auto& spans : schedule) {
    plan_step(kv, spans, stream);
    const LabelPlan& step = kv.label_plan();
    const std::vector<int32_t> positions = positions_of(step);
    const auto tokens = std::ssize(positions);
    Elements hidden(run.dtype, tokens, width, run.device);
    for (int64_t t = 0; t < tokens; ++t) {
      hidden.set_row(t, row_at(file.hidden, positions[static_cast<size_t>(t)], width));
    }
    hidden.copy_to_device(stream);
    const List<int32_t> positions_list(positions, run.device, stream);
    const List<int64_t> slots(step.slots, run.device, stream);
    Elements out(run.dtype, tokens, width, run.device);
    attention.plan(step.batch(), {.sm_scale = file.config.sm_scale}, stream);
    if (run.staged) {
      const LayerActivations a =
          layer.project(hidden.view(), positions_list.view(), workspace, stream);
      kv.write(kLayerIdx, "main", a.ckv, a.kpe, stream);
      attention.run({.q_nope = a.q_nope,
                     .q_pe = a.q_pe,
                     .cache = pool.views(kLayerIdx),
                     .out = a.attended,
                     .lse = {}},
                    stream);
      layer.output(a.attended, out.view(), workspace, stream);
    } else {
      layer.forward({.hidden = hidden.view(),
                     .positions = positions_list.view(),
                     .slots = slots.view(),
                     .pool = &pool,
                     .layer_idx = kLayerIdx,
                     .attention = &attention,
                     .out = out.view()},
                    workspace, stream);
    }
    kv.commit();
    out.copy_to_host(stream);
    stream.synchronize();
    for (size_t i = 0; i < step.views.size(); ++i) {
      auto& output = outputs[step.views[i].request];
      for (int64_t t = step.qo_indptr[i]; t < step.qo_indptr[i + 1]; ++t) {
        out.get_row(t, row_at(output, positions[static_cast<size_t>(t)], width));
      }
    }
  }
  return outputs;
}

double max_rel_error(const LayerFile& file, const std::vector<float>& output) {
  double largest = 0;
  for (size_t i = 0; i < output.size(); ++i) {
    const double error = std::abs(double{output[i]} - file.expected[i]);
    if (!std::isfinite(error)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, error);
  }
  return largest / file.output_std();
}

double error_bound(const LayerFile& file, DType dtype) {
  if (dtype == DType::kFloat32) return 2e-4;
  const double score = file.score_rms();
  const double most_of = std::sqrt(2 * std::log(100.0 * static_cast<double>(file.expected.size())));
  const double unit = dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
  return most_of * kRounding * unit * file.largest_row() * std::sqrt(4 + 2 * score * score);
}

}  // namespace mla::cases
