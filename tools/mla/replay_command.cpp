#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cfloat>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "mla/command.hpp"
#include "mla/device_option.hpp"
#include "mla/interrupt.hpp"
#include "mla/number_option.hpp"
#include "mla/output.hpp"
#include "mla/progress.hpp"
#include "mla/replay_report.hpp"
#include "mla/server.hpp"

namespace mla::cli {
namespace {

constexpr uint64_t kMaxDrafts = 1024;
constexpr int kInterrupted = 130;  // as a shell reports the signal

// Serves the whole workload; false where the user interrupted it.
bool serve(Server& server, bool show_progress) {
  Progress progress(server.total_tokens(), "tokens", show_progress);
  while (!server.done() && !interrupted()) {
    server.step();
    progress.show(server.served_tokens(),
                  fmt::format("{} requests done, {} at work", server.stats().requests_finished,
                              server.num_running()));
  }
  return !interrupted();  // also in the last step, whose checks then were not all made
}

struct ReplayOutput {
  JsonTarget json;
  bool quiet = false;      // no progress
  bool no_limits = false;  // the CPU's limits are not measured
};

int run_replay(const ReplayOptions& options, const ReplayOutput& output) {
  const auto trace = read_trace_file(options.trace, options.max_requests);
  const auto requests = make_workload(trace, options.length_scale);
  check_writable(output.json);
  Server server(options, requests);
  catch_interrupts();
  const bool completed = serve(server, !output.quiet);
  server.finish();
  Roofs roofs;
  if (completed && !output.no_limits && options.device == Device{}) {
    roofs = cpu::measure_limits(server.kernel(), server.executor());
  }
  if (!output.json.to_stdout()) fmt::print("{}", replay_table(options, server, roofs));
  for (const std::string& message : server.checker().messages()) {
    fmt::print(stderr, "mla: {}\n", message);
  }
  if (!completed) {
    fmt::print(stderr, "mla: interrupted\n");
    return kInterrupted;
  }
  write_json(output.json, replay_json(options, server, roofs));
  const ReplayStats& stats = server.stats();
  return stats.requests_failed == 0 && stats.pages_leaked == 0 ? kDone : kCheckFailed;
}

DType dtype_named(const std::string& name) {
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    if (name == name_of(dtype)) return dtype;
  }
  return DType::kBFloat16;
}

void add_options(CLI::App& command, ReplayOptions& options) {
  const auto integer = [&command](const char* name, auto& value, uint64_t least, uint64_t most,
                                  const char* text) {
    return command.add_option(name, value, text)->transform(whole_number(least, most));
  };
  command.add_option("TRACE", options.trace, "JSON lines, Mooncake format")->required();
  integer("--requests", options.max_requests, 1, INT64_MAX, "only the first so many (all)");
  command.add_option("--length-scale", options.length_scale, "scales lengths and blocks alike")
      ->transform(real_number(1e-6, 64))
      ->capture_default_str();
  integer("--heads", options.num_heads, 1, kMaxHeads, "query heads")->capture_default_str();
  integer("--layers", options.num_layers, 1, 1024, "layers of the pool")->capture_default_str();
  integer("--kv-lora-rank", options.kv_lora_rank, 1, kMaxLatentWidth, "columns of ckv")
      ->capture_default_str();
  integer("--qk-rope-head-dim", options.qk_rope_head_dim, 0, kMaxLatentWidth, "columns of kpe")
      ->capture_default_str();
  command.add_option("--sm-scale", options.sm_scale, "softmax scale (192^-0.5)")
      ->transform(real_number(FLT_MIN, FLT_MAX));
  integer("--page-size", options.page_size, 1, 1 << 20, "tokens of a page")->capture_default_str();
  integer("--pages", options.num_pages, 1, kMaxPoolPages - 1,
          "usable pages (room for 131072 tokens)");
  integer("--token-budget", options.token_budget, 1, 1 << 20, "most new tokens of a step")
      ->capture_default_str();
  integer("--max-running", options.max_running, 1, kMaxRows, "most requests at work")
      ->capture_default_str();
  integer("--speculate", options.num_drafts, 0, kMaxDrafts, "drafts that a decode step verifies")
      ->capture_default_str();
  command
      .add_option_function<std::string>(
          "--dtype", [&options](const std::string& name) { options.dtype = dtype_named(name); },
          "of queries, cache and outputs (bf16)")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  command
      .add_option_function<std::string>(
          "--device",
          [&options](const std::string& name) { options.device = find_device(name, "replay"); },
          "where it runs: cpu, cuda or cuda:N (cpu)")
      ->transform(device_option());
  integer("--threads", options.num_threads, 1, 1024, "threads (all processors)");
  integer("--check", options.checks_per_step, 0, 1 << 20,
          "rows of a step checked against the reference")
      ->capture_default_str();
  integer("--seed", options.seed, 0, UINT64_MAX, "of all data")->capture_default_str();
  command.add_option("--kernel", options.kernel,
                     "a kernel of `mla doctor` (the first that accepts)");
  command.add_flag("--arrivals", options.obey_arrivals, "obey the trace's timestamps");
}

}  // namespace

void add_replay_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("replay", "serves a trace: the main job");
  const auto options = std::make_shared<ReplayOptions>();
  const auto output = std::make_shared<ReplayOutput>();
  add_options(*command, *options);
  add_json_option(*command, output->json);
  command->add_flag("--quiet", output->quiet, "no progress");
  command->add_flag("--no-limits", output->no_limits,
                    "do not measure the machine's limits at the end (about a second)");
  command->callback([=, &status] { status = run_replay(*options, *output); });
}

}  // namespace mla::cli
