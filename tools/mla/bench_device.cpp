#include "mla/bench_device.hpp"

#include <fmt/chrono.h>
#include <fmt/core.h>

#include <algorithm>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <vector>

#include "cases/check.hpp"
#include "cases/random.hpp"
#include "cuda/card.hpp"
#include "device/runtime.hpp"
#include "mla/bench_shapes.hpp"
#include "mla/bench_spread.hpp"
#include "mla/clock.hpp"
#include "mla/command.hpp"
#include "mla/progress.hpp"
#include "mla/usage_error.hpp"
#include "mla/version.hpp"

namespace mla::cli {
namespace {

constexpr int64_t kColdBytes = int64_t{400} << 20;  // several times any level-2 cache of today
constexpr int64_t kMostLayers = 256;
constexpr double kSecondsOfARound = 0.02;
constexpr int64_t kCheckedTokens =
    65536;  // of the smaller batch that is held against the reference
constexpr int64_t kCheckedRows = 3;

class DeviceBytes {
 public:
  DeviceBytes(device::Runtime& runtime, size_t bytes)
      : runtime_(runtime), data_(static_cast<std::byte*>(runtime.allocate(bytes))) {}
  ~DeviceBytes() { runtime_.release(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  std::byte* data() const { return data_; }

 private:
  device::Runtime& runtime_;
  std::byte* data_;
};

// Uniform values: one random block again and again, of a length that no row divides.
void fill_random(device::Runtime& runtime, std::byte* to, int64_t bytes, DType dtype) {
  constexpr int64_t kBlockValues = (int64_t{4} << 20) - 1;
  static std::vector<std::byte> block;
  const int64_t block_bytes = kBlockValues * size_of(dtype);
  block.resize(static_cast<size_t>(block_bytes));
  cases::fill_uniform(cases::row_key(7, 0, 0), dtype, block.data(), kBlockValues);
  for (int64_t at = 0; at < bytes; at += block_bytes) {
    const auto part = static_cast<size_t>(std::min(block_bytes, bytes - at));
    runtime.copy_to_device(to + at, block.data(), part, {});
  }
  runtime.synchronize({});
}

struct Measurement {
  BenchShape shape;
  std::string kernel{};
  std::string fault{};
  double max_abs_error = 0;
  PlanInfo plan{};
  std::vector<double> round_us{};

  double us() const { return spread_of(round_us).median; }
};

// The shape with requests short enough to be computed in double beside it.
void check(Measurement& m) {
  cases::AttentionCase c = m.shape.attention_case;
  const auto most = static_cast<int32_t>(
      std::max<int64_t>(1, kCheckedTokens / static_cast<int64_t>(c.kv_lens.size())));
  for (int32_t& kv_len : c.kv_lens) kv_len = std::min(kv_len, most);
  for (int32_t& q_len : c.q_lens) q_len = std::min(q_len, 16);
  const cases::CheckReport report = cases::check_case(c, {.max_rows = kCheckedRows, .num_runs = 1});
  m.kernel = report.kernel;
  m.fault = report.fault;
  m.max_abs_error = report.max_abs_error;
}

// Index arrays of a batch on scattered pages.
struct Indices {
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, kv_indices;

  explicit Indices(const cases::AttentionCase& c) {
    for (size_t row = 0; row < c.q_lens.size(); ++row) {
      qo_indptr.push_back(qo_indptr.back() + c.q_lens[row]);
      kv_indptr.push_back(kv_indptr.back() +
                          static_cast<int32_t>(c.pages_of(static_cast<int64_t>(row))));
    }
    kv_indices.resize(static_cast<size_t>(kv_indptr.back()));
    std::iota(kv_indices.begin(), kv_indices.end(), 0);
    std::mt19937 generator(1);  // NOLINT(cert-msc51-cpp): the same pages every time
    std::shuffle(kv_indices.begin(), kv_indices.end(), generator);
  }
};

void time_shape(const DeviceBenchOptions& options, Measurement& m) {
  const cases::AttentionCase& c = m.shape.attention_case;
  device::Runtime& runtime = device::runtime_of(options.device);
  const Geometry& g = c.geometry;
  const Indices indices(c);
  const int64_t tokens = c.num_tokens();
  const int64_t pages = c.pages_needed();
  const int64_t layer_bytes = pages * g.page_size * g.latent_width() * size_of(g.kv_dtype);
  const int64_t layers = std::clamp(kColdBytes / layer_bytes + 1, int64_t{2}, kMostLayers);
  const int64_t q_bytes = tokens * g.num_heads * g.latent_width() * size_of(g.dtype);
  const DeviceBytes cache(runtime, static_cast<size_t>(layers * layer_bytes));
  const DeviceBytes queries(runtime, static_cast<size_t>(q_bytes));
  const DeviceBytes out(runtime, static_cast<size_t>(q_bytes));
  const DeviceBytes lse(runtime, static_cast<size_t>(tokens * g.num_heads) * sizeof(float));
  fill_random(runtime, cache.data(), layers * layer_bytes, g.kv_dtype);
  fill_random(runtime, queries.data(), q_bytes, g.dtype);

  PagedAttention attention({.geometry = g,
                            .num_pages = pages,
                            .device = options.device,
                            .limits = {.max_listed_pages = pages},
                            .bucket = Bucket{.num_rows = c.num_rows(), .num_tokens = tokens},
                            .capture = true,
                            .kernel = options.kernel});
  const Stream stream = runtime.create_stream();
  attention.plan({.qo_indptr = indices.qo_indptr,
                  .kv_indptr = indices.kv_indptr,
                  .kv_indices = indices.kv_indices,
                  .kv_len = c.kv_lens},
                 {.sm_scale = c.sm_scale, .causal = c.causal}, stream);
  m.plan = attention.info();
  m.kernel = attention.kernel();
  const auto joined = contiguous_view(static_cast<const void*>(queries.data()),
                                      std::array{tokens, int64_t{g.num_heads}, g.latent_width()},
                                      g.dtype, options.device);
  RunArgs args{
      .q_nope = columns(joined, 0, g.kv_lora_rank),
      .q_pe = columns(joined, g.kv_lora_rank, g.qk_rope_head_dim),
      .out = contiguous_view(static_cast<void*>(out.data()),
                             std::array{tokens, int64_t{g.num_heads}, int64_t{g.kv_lora_rank}},
                             g.dtype, options.device),
      .lse = contiguous_view(reinterpret_cast<float*>(lse.data()),
                             std::array{tokens, int64_t{g.num_heads}}, options.device)};
  runtime.begin_capture(stream);
  for (int64_t layer = 0; layer < layers; ++layer) {
    args.cache =
        split_latent(contiguous_view(static_cast<const void*>(cache.data() + layer * layer_bytes),
                                     std::array{pages, int64_t{g.page_size}, g.latent_width()},
                                     g.kv_dtype, options.device),
                     g.kv_lora_rank);
    attention.run(args, stream);
  }
  const device::Graph graph = runtime.end_capture(stream);
  const auto time_replays = [&](int64_t count) {
    const double begin = now_s();
    for (int64_t i = 0; i < count; ++i) runtime.replay(graph, stream);
    runtime.synchronize(stream);
    return now_s() - begin;
  };
  time_replays(2);
  const double once = time_replays(1);
  const auto count = std::clamp<int64_t>(static_cast<int64_t>(kSecondsOfARound / once), 1, 10000);
  for (int round = 0; round < options.rounds; ++round) {
    m.round_us.push_back(time_replays(count) / static_cast<double>(count * layers) * 1e6);
  }
  runtime.destroy_graph(graph);
  runtime.destroy_stream(stream);
}

std::vector<Measurement> measure(const DeviceBenchOptions& options) {
  std::vector<Measurement> all;
  for (BenchShape& shape : gpu_bench_shapes()) {
    if ((shape.group + ": " + shape.attention_case.name).find(options.filter) ==
        std::string::npos) {
      continue;
    }
    shape.attention_case.device = options.device;
    shape.attention_case.kernel = options.kernel;
    all.push_back({.shape = std::move(shape)});
  }
  if (all.empty()) {
    throw UsageError(fmt::format("--filter {}: no shape has this in its name", options.filter));
  }
  Progress progress(static_cast<int64_t>(all.size()), "shapes", !options.json.to_stdout());
  int64_t done = 0;
  for (Measurement& m : all) {
    check(m);
    time_shape(options, m);
    progress.show(++done, m.shape.attention_case.name);
  }
  return all;
}

int64_t total_tokens(const BenchShape& shape) {
  const auto& kv_lens = shape.attention_case.kv_lens;
  return std::accumulate(kv_lens.begin(), kv_lens.end(), int64_t{0});
}

Json json_of(const Measurement& m) {
  const cases::AttentionCase& c = m.shape.attention_case;
  const Spread us = spread_of(m.round_us);
  const bool equal =
      std::ranges::all_of(c.kv_lens, [&](int32_t len) { return len == c.kv_lens[0]; });
  return {{"group", m.shape.group},
          {"shape", c.name},
          {"kernel", m.kernel},
          {"rows", c.num_rows()},
          {"kv", equal ? Json(c.kv_lens[0]) : Json()},
          {"heads", c.geometry.num_heads},
          {"q", c.q_lens[0]},
          {"lengths", equal ? "equal" : "log-normal"},
          {"total_tokens", total_tokens(m.shape)},
          {"us", us.median},
          {"spread", {us.low, us.high}},
          {"gbps", m.shape.bytes() / us.median * 1e-3},
          {"tflops", m.shape.flops() / us.median * 1e-6},
          {"splits", m.plan.num_splits},
          {"max_error", m.max_abs_error},
          {"fault", m.fault}};
}

}  // namespace

int run_device_bench(const DeviceBenchOptions& options) {
  const cuda::Card card = cuda::describe_card(options.device.index);
  const std::vector<Measurement> all = measure(options);
  Table table({"shape", "kernel", "us", "quartiles", "GB/s", "TFLOP/s", "splits", "error"});
  Json json = {{"card", card.name},
               {"driver", card.driver_version},
               {"cuda", card.runtime_version},
               {"version", version()},
               {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
               {"commit", options.note},
               {"rounds", options.rounds}};
  json["cells"] = Json::array();
  int status = kDone;
  for (const Measurement& m : all) {
    const Spread us = spread_of(m.round_us);
    table.add({m.shape.attention_case.name, m.kernel, fmt::format("{:.1f}", us.median),
               fmt::format("{:.1f}-{:.1f}", us.low, us.high),
               fmt::format("{:.0f}", m.shape.bytes() / us.median * 1e-3),
               fmt::format("{:.0f}", m.shape.flops() / us.median * 1e-6),
               std::to_string(m.plan.num_splits),
               m.fault.empty() ? fmt::format("{:.1e}", m.max_abs_error) : "WRONG"});
    json["cells"].push_back(json_of(m));
    if (m.fault.empty()) continue;
    fmt::print(stderr, "mla: {}: {}\n", m.shape.attention_case.name, m.fault);
    status = kCheckFailed;
  }
  if (!options.json.to_stdout())
    fmt::print("{}, {}\n{}", card.name, card.driver_version, table.text());
  write_json(options.json, json);
  return status;
}

}  // namespace mla::cli
