#include "mla/bench_device.hpp"

#include <fmt/chrono.h>
#include <fmt/core.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "cases/check.hpp"
#include "cuda/card.hpp"
#include "mla/bench_cell.hpp"
#include "mla/bench_shapes.hpp"
#include "mla/bench_spread.hpp"
#include "mla/ceilings.hpp"
#include "mla/command.hpp"
#include "mla/peer_library.hpp"
#include "mla/progress.hpp"
#include "mla/usage_error.hpp"
#include "mla/version.hpp"

namespace mla::cli {
namespace {

constexpr int64_t kCheckedTokens =
    65536;  // of the smaller batch that is held against the reference
constexpr int64_t kCheckedRows = 3;

struct Measurement {
  BenchShape shape;
  std::string fault{};
  double max_abs_error = 0;
  CellTimes times{};
};

// The shape with requests short enough to be computed in double beside it.
void check(Measurement& m) {
  cases::AttentionCase c = m.shape.attention_case;
  const auto most = static_cast<int32_t>(
      std::max<int64_t>(1, kCheckedTokens / static_cast<int64_t>(c.kv_lens.size())));
  for (int32_t& kv_len : c.kv_lens) kv_len = std::min(kv_len, most);
  for (int32_t& q_len : c.q_lens) q_len = std::min(q_len, 16);
  const cases::CheckReport report = cases::check_case(c, {.max_rows = kCheckedRows, .num_runs = 1});
  m.fault = report.fault;
  m.max_abs_error = report.max_abs_error;
}

std::vector<Measurement> measure(const DeviceBenchOptions& options,
                                 std::span<const PeerLibrary> peers) {
  std::vector<Measurement> all;
  std::vector<BenchShape> shapes = gpu_bench_shapes();
  if (options.kernel.empty()) {
    for (const std::string& line : drop_unserved(shapes, options.device)) {
      fmt::print(stderr, "mla: {}\n", line);
    }
  }
  for (BenchShape& shape : shapes) {
    if ((shape.group + ": " + shape.attention_case.name).find(options.filter) ==
        std::string::npos) {
      continue;
    }
    shape.attention_case.device = options.device;
    if (!options.kernel.empty()) shape.attention_case.kernel = options.kernel;
    all.push_back({.shape = std::move(shape)});
  }
  if (all.empty()) {
    throw UsageError(fmt::format("--filter {}: no shape has this in its name", options.filter));
  }
  Progress progress(static_cast<int64_t>(all.size()), "shapes", !options.json.to_stdout());
  int64_t done = 0;
  for (Measurement& m : all) {
    check(m);
    m.times = time_cell(m.shape.attention_case, peers, {.rounds = options.rounds});
    progress.show(++done, m.shape.attention_case.name);
  }
  return all;
}

int64_t total_tokens(const BenchShape& shape) {
  const auto& kv_lens = shape.attention_case.kv_lens;
  return std::accumulate(kv_lens.begin(), kv_lens.end(), int64_t{0});
}

// Microseconds below which no kernel can be: its pages must be read, its products made. Null where
// neither was measured.
Json floor_us(const Measurement& m, const Ceilings& ceilings) {
  double floor = m.times.read_us.empty() ? 0 : spread_of(m.times.read_us).median;
  if (ceilings.matrix_tflops && size_of(m.shape.attention_case.geometry.dtype) == 2) {
    floor = std::max(floor, m.shape.matrix_flops() / *ceilings.matrix_tflops * 1e-6);
  }
  return floor > 0 ? Json(floor) : Json();
}

Json json_of(const PeerTimes& peer) {
  const bool timed = peer.fault.empty();
  const Spread us = timed ? spread_of(peer.round_us) : Spread{};
  return {{"name", peer.name},
          {"us", timed ? Json(us.median) : Json()},
          {"spread", timed ? Json{us.low, us.high} : Json()},
          {"plan_us", peer.plan_us},
          {"max_difference", peer.max_difference},
          {"fault", peer.fault}};
}

Json json_of(const Measurement& m, const Ceilings& ceilings) {
  const cases::AttentionCase& c = m.shape.attention_case;
  const Spread us = spread_of(m.times.round_us);
  const bool equal =
      std::ranges::all_of(c.kv_lens, [&](int32_t len) { return len == c.kv_lens[0]; });
  Json peers = Json::array();
  for (const PeerTimes& peer : m.times.peers) peers.push_back(json_of(peer));
  return {{"group", m.shape.group},
          {"shape", c.name},
          {"kernel", m.times.kernel},
          {"rows", c.num_rows()},
          {"kv", equal ? Json(c.kv_lens[0]) : Json()},
          {"heads", c.geometry.num_heads},
          {"q", c.q_lens[0]},
          {"lengths", equal ? "equal" : "log-normal"},
          {"total_tokens", total_tokens(m.shape)},
          {"us", us.median},
          {"spread", {us.low, us.high}},
          {"plan_us", m.times.plan_us},
          {"gbps", m.shape.bytes() / us.median * 1e-3},
          {"tflops", m.shape.flops() / us.median * 1e-6},
          {"splits", m.times.plan.num_splits},
          {"floor_us", floor_us(m, ceilings)},
          {"read_us", m.times.read_us.empty() ? Json() : Json(spread_of(m.times.read_us).median)},
          {"peers", std::move(peers)},
          {"max_error", m.max_abs_error},
          {"fault", m.fault}};
}

Json json_of(const DeviceBenchOptions& options, const cuda::Card& card, const Ceilings& ceilings,
             const std::vector<Measurement>& all) {
  Json json = header_of(options, card);
  json["ceilings"] = {
      {"read_gbps", ceilings.read_gbps},
      {"matrix_tflops", ceilings.matrix_tflops ? Json(*ceilings.matrix_tflops) : Json()},
      {"empty_node_us", ceilings.empty_node_us}};
  json["cells"] = Json::array();
  for (const Measurement& m : all) json["cells"].push_back(json_of(m, ceilings));
  return json;
}

std::string us_of(const CellTimes& times, const std::string& peer_name) {
  for (const PeerTimes& peer : times.peers) {
    if (peer.name != peer_name) continue;
    return peer.fault.empty() ? fmt::format("{:.1f}", spread_of(peer.round_us).median) : "WRONG";
  }
  return "-";
}

std::string table_of(const std::vector<Measurement>& all, const Ceilings& ceilings,
                     std::span<const PeerLibrary> peers) {
  std::vector<std::string> header = {"shape",   "kernel", "us",    "quartiles", "GB/s",
                                     "TFLOP/s", "splits", "floor", "error"};
  for (const PeerLibrary& peer : peers) header.push_back(peer.name() + " us");
  Table table(header);
  for (const Measurement& m : all) {
    const Spread us = spread_of(m.times.round_us);
    const Json floor = floor_us(m, ceilings);
    std::vector<std::string> row = {
        m.shape.attention_case.name,
        m.times.kernel,
        fmt::format("{:.1f}", us.median),
        fmt::format("{:.1f}-{:.1f}", us.low, us.high),
        fmt::format("{:.0f}", m.shape.bytes() / us.median * 1e-3),
        fmt::format("{:.0f}", m.shape.flops() / us.median * 1e-6),
        std::to_string(m.times.plan.num_splits),
        floor.is_null() ? "-" : fmt::format("{:.1f}", floor.get<double>()),
        m.fault.empty() ? fmt::format("{:.1e}", m.max_abs_error) : "WRONG"};
    for (const PeerLibrary& peer : peers) row.push_back(us_of(m.times, peer.name()));
    table.add(row);
  }
  return fmt::format("{}reads {:.0f} GB/s, bf16 products {} TFLOP/s, an empty kernel {:.2f} us\n",
                     table.text(), ceilings.read_gbps,
                     ceilings.matrix_tflops ? fmt::format("{:.0f}", *ceilings.matrix_tflops) : "-",
                     ceilings.empty_node_us);
}

// Says what is wrong on standard error; the exit status.
int report_faults(const std::vector<Measurement>& all) {
  int status = kDone;
  const auto report = [&](const Measurement& m, const std::string& who, const std::string& fault) {
    if (fault.empty()) return;
    fmt::print(stderr, "mla: {}: {}{}\n", m.shape.attention_case.name, who, fault);
    status = kCheckFailed;
  };
  for (const Measurement& m : all) {
    report(m, "", m.fault);
    for (const PeerTimes& peer : m.times.peers) report(m, peer.name + ": ", peer.fault);
  }
  return status;
}

std::vector<PeerLibrary> open_peers(const DeviceBenchOptions& options) {
  if (!options.peers.empty() && options.device != Device{DeviceKind::kCuda, 0}) {
    throw UsageError("--peer: peers run on the first GPU (--device cuda)");
  }
  return {options.peers.begin(), options.peers.end()};
}

}  // namespace

Json header_of(const DeviceBenchOptions& options, const cuda::Card& card) {
  return {{"card", card.name},
          {"driver", card.driver_version},
          {"cuda", card.runtime_version},
          {"version", version()},
          {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
          {"commit", options.note},
          {"rounds", options.rounds}};
}

int run_device_bench(const DeviceBenchOptions& options) {
  const std::vector<PeerLibrary> peers = open_peers(options);
  const cuda::Card card = cuda::describe_card(options.device.index);
  const Ceilings ceilings = measure_ceilings(options.device);
  const std::vector<Measurement> all = measure(options, peers);
  if (!options.json.to_stdout()) {
    fmt::print("{}, driver for CUDA {}\n{}", card.name, card.driver_cuda_version,
               table_of(all, ceilings, peers));
  }
  write_json(options.json, json_of(options, card, ceilings, all));
  return report_faults(all);
}

}  // namespace mla::cli
