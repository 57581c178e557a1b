#include "mla/calibrate.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "core/attention_impl.hpp"
#include "cuda/card.hpp"
#include "mla/bench_cell.hpp"
#include "mla/bench_spread.hpp"
#include "mla/command.hpp"
#include "mla/cost_fit.hpp"
#include "mla/progress.hpp"
#include "mla/usage_error.hpp"

namespace mla::cli {
namespace {

/// A kernel at a shape; `few` and `many` heads give tiles of so many rows.
struct Target {
  std::string_view kernel;
  int32_t rank, rope;
  int32_t few, many;
};

// Kernels whose plans the table's costs make better; docs/planner.md says which they do not.
constexpr Target kTargets[] = {
    {"sm90_dense", 512, 64, 16, 64},
    {"sm90_dense", 512, 64, 80, 128},
    {"sm90_dense", 512, 0, 16, 64},
    {"sm90_dense", 512, 0, 80, 128},
};

/// What each worker of a batch has to do.
struct Load {
  int32_t tiles, blocks, parts;
};

// One tile and several, short and long; then a part for each worker, of rows in few and many parts.
constexpr Load kLoads[] = {{1, 2, 1},  {1, 8, 1},  {1, 32, 1}, {2, 2, 1}, {2, 8, 1},
                           {4, 4, 1},  {4, 16, 1}, {1, 2, 2},  {1, 8, 2}, {1, 4, 4},
                           {1, 16, 4}, {1, 2, 16}, {1, 8, 16}, {1, 4, 32}};

Geometry geometry_of(const Target& target, int32_t heads) {
  return {.num_heads = heads,
          .kv_lora_rank = target.rank,
          .qk_rope_head_dim = target.rope,
          .page_size = 64,
          .dtype = DType::kBFloat16,
          .kv_dtype = DType::kBFloat16};
}

KernelQuery query_of(const Target& target, int32_t heads, Device device) {
  const Geometry geometry = geometry_of(target, heads);
  const int64_t width = geometry.latent_width();
  return {.geometry = geometry,
          .strides = {.ckv_page = geometry.page_size * width,
                      .ckv_row = width,
                      .kpe_page = geometry.page_size * width,
                      .kpe_row = width},
          .device = device};
}

/// A point without its time, and the batch that it stands for. With parts the last workers may be
/// idle where their number is no multiple.
std::pair<CostPoint, cases::AttentionCase> make_point(const Target& target, int32_t heads,
                                                      const Load& load, const AttentionImpl& impl,
                                                      Device device) {
  const KernelQuery query = query_of(target, heads, device);
  const plan::CostModel model = impl.cost_model(query);
  const int32_t workers = impl.num_workers(query);
  const auto requests =
      static_cast<size_t>(std::max(1, workers * load.tiles / std::max(1, load.parts)));
  cases::AttentionCase c;
  c.geometry = query.geometry;
  c.q_lens.assign(requests, 1);
  c.kv_lens.assign(requests, load.blocks * load.parts * model.block_tokens);
  c.splits.forced_count = load.parts;
  c.kernel = target.kernel;
  c.device = device;
  const CostPoint point{
      .rows = heads, .tiles = load.tiles, .blocks = load.blocks, .parts = load.parts};
  return {point, std::move(c)};
}

struct Calibration {
  Target target{};
  int32_t tile_rows = 0;
  std::vector<CostPoint> points{};
  CostFit fit{};
};

/// The line of src/cuda/cost_table.cpp.
std::string table_line(const Calibration& c, const std::string& card) {
  return fmt::format(
      "    {{\"{}\", \"{}\", {}, {}, {}, {{{:.0f}, {:.1f}, {:.3g}, {:.3g}, {:.0f}}}}},", card,
      c.target.kernel, c.target.rank, c.target.rope, c.tile_rows, c.fit.tile_ns, c.fit.block_ns,
      c.fit.block_row_ns, c.fit.partial_row_ns, c.fit.merge_ns);
}

Json json_of(const Calibration& c) {
  Json points = Json::array();
  for (size_t i = 0; i < c.points.size(); ++i) {
    const CostPoint& point = c.points[i];
    points.push_back({{"rows", point.rows},
                      {"tiles", point.tiles},
                      {"blocks", point.blocks},
                      {"parts", point.parts},
                      {"us", point.ns * 1e-3},
                      {"predicted_us", c.fit.predicted_ns[i] * 1e-3}});
  }
  return {{"kernel", c.target.kernel},          {"kv_lora_rank", c.target.rank},
          {"qk_rope_head_dim", c.target.rope},  {"tile_rows", c.tile_rows},
          {"tile_ns", c.fit.tile_ns},           {"block_ns", c.fit.block_ns},
          {"block_row_ns", c.fit.block_row_ns}, {"partial_row_ns", c.fit.partial_row_ns},
          {"merge_ns", c.fit.merge_ns},         {"launch_ns", c.fit.launch_ns},
          {"rms_residual", c.fit.rms_share},    {"worst_residual", c.fit.worst_share},
          {"points", std::move(points)}};
}

/// The targets of the options that the card's kernels serve.
std::vector<Target> chosen_targets(const DeviceBenchOptions& options) {
  std::vector<Target> targets;
  for (const Target& target : kTargets) {
    if (!options.kernel.empty() && target.kernel != options.kernel) continue;
    if (find_impl(query_of(target, target.many, options.device), target.kernel) == nullptr)
      continue;
    targets.push_back(target);
  }
  if (targets.empty()) {
    throw UsageError(
        options.kernel.empty()
            ? "--calibrate: no kernel that can be measured runs on this card"
            : fmt::format("--kernel {}: not one that is measured on this card", options.kernel));
  }
  return targets;
}

Calibration calibrate(const Target& target, const DeviceBenchOptions& options) {
  const KernelQuery query = query_of(target, target.many, options.device);
  const AttentionImpl& impl = *find_impl(query, target.kernel);
  Calibration result{.target = target, .tile_rows = impl.cost_model(query).tile_rows};
  for (const int32_t heads : {target.few, std::min(target.many, result.tile_rows)}) {
    for (const Load& load : kLoads) {
      auto [point, attention_case] = make_point(target, heads, load, impl, options.device);
      const CellTimes times =
          time_cell(attention_case, {}, {.rounds = options.rounds, .time_reads = false});
      point.ns = spread_of(times.round_us).median * 1e3;
      result.points.push_back(point);
    }
  }
  result.fit = fit_costs(result.points);
  return result;
}

}  // namespace

int run_calibration(const DeviceBenchOptions& options) {
  const cuda::Card card = cuda::describe_card(options.device.index);
  const std::vector<Target> targets = chosen_targets(options);
  Progress progress(static_cast<int64_t>(targets.size()), "kernels and shapes",
                    !options.json.to_stdout());
  Table table({"kernel", "shape", "tile rows", "tile ns", "block ns", "block and row ns",
               "partial row ns", "merge ns", "launch ns", "rms", "worst"});
  std::string lines;
  Json json = header_of(options, card);
  json["kernels"] = Json::array();
  int64_t done = 0;
  for (const Target& target : targets) {
    const Calibration c = calibrate(target, options);
    const std::string shape = fmt::format("{}+{}", target.rank, target.rope);
    table.add({std::string(target.kernel), shape, std::to_string(c.tile_rows),
               fmt::format("{:.0f}", c.fit.tile_ns), fmt::format("{:.1f}", c.fit.block_ns),
               fmt::format("{:.3g}", c.fit.block_row_ns),
               fmt::format("{:.3g}", c.fit.partial_row_ns), fmt::format("{:.0f}", c.fit.merge_ns),
               fmt::format("{:.0f}", c.fit.launch_ns),
               fmt::format("{:.1f} %", 100 * c.fit.rms_share),
               fmt::format("{:+.1f} %", 100 * c.fit.worst_share)});
    lines += table_line(c, card.name) + "\n";
    json["kernels"].push_back(json_of(c));
    progress.show(++done, fmt::format("{} {}", target.kernel, shape));
  }
  if (!options.json.to_stdout()) {
    fmt::print("{}\nfor src/cuda/cost_table.cpp:\n{}", table.text(), lines);
  }
  write_json(options.json, json);
  return kDone;
}

}  // namespace mla::cli
