#include <fmt/chrono.h>
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cases/check.hpp"
#include "cpu/machine_limits.hpp"
#include "mla/bench_device.hpp"
#include "mla/bench_shapes.hpp"
#include "mla/bench_spread.hpp"
#include "mla/calibrate.hpp"
#include "mla/clock.hpp"
#include "mla/command.hpp"
#include "mla/device_option.hpp"
#include "mla/machine.hpp"
#include "mla/number_option.hpp"
#include "mla/output.hpp"
#include "mla/progress.hpp"
#include "mla/usage_error.hpp"
#include "mla/version.hpp"

namespace mla::cli {
namespace {

constexpr double kSecondsOfARound = 0.06;  // of one shape, at least one run
constexpr double kSecondsOfAQuickRound = 0.005;
constexpr int64_t kRowsCheckedOfAShape = 4;

struct BenchOptions {
  std::string device = "cpu";
  std::string filter;
  std::string kernel;
  std::string note;
  std::vector<std::string> peers;
  std::vector<int> threads;  // empty: one, and all processors
  int rounds = 5;
  bool quick = false;
  bool calibrate = false;
  JsonTarget json;
};

/// One shape on a number of threads: planned once, timed round by round.
class Contender {
 public:
  Contender(const BenchShape& shape, const std::string& kernel,
            const std::shared_ptr<Executor>& executor)
      : shape_(shape), executor_(executor) {
    shape_.attention_case.kernel = kernel;
    const auto check =
        cases::check_case(shape_.attention_case,
                          {.max_rows = kRowsCheckedOfAShape, .num_runs = 1, .executor = executor});
    kernel_ = check.kernel;
    fault_ = check.fault;
    max_abs_error_ = check.max_abs_error;
  }

  void time_round(double seconds) {
    // Memory is taken for the round only: all shapes together would be more than a gigabyte.
    cases::Problem problem(shape_.attention_case);
    AttentionConfig config = problem.config();
    config.executor = executor_;
    PagedAttention attention(config);
    attention.plan(problem.batch(), cases::Problem::options_of(shape_.attention_case));
    const RunArgs args = problem.args();
    attention.run(args);  // pages of memory come in, caches fill
    std::vector<double> run_s;
    const double end = now_s() + seconds;
    do {
      const double begin = now_s();
      attention.run(args);
      run_s.push_back(now_s() - begin);
    } while (now_s() < end);
    round_s_.push_back(spread_of(run_s).median);
  }

  const BenchShape& shape() const { return shape_; }
  int threads() const { return executor_->num_threads(); }
  const std::string& kernel() const { return kernel_; }
  const std::string& fault() const { return fault_; }
  double max_abs_error() const { return max_abs_error_; }
  Spread seconds() const { return spread_of(round_s_); }

 private:
  BenchShape shape_;
  std::shared_ptr<Executor> executor_;
  std::string kernel_;
  std::string fault_;
  double max_abs_error_ = 0;
  std::vector<double> round_s_;
};

/// The machine's fp32 rate on a number of threads, measured in every round between the shapes.
struct Roof {
  std::shared_ptr<Executor> executor;
  std::string kernel;
  std::vector<double> gflops;
};

struct BenchResult {
  std::vector<Roof> roofs;
  std::vector<Contender> contenders;

  double roof_of(const Contender& contender) const {
    const auto roof = std::ranges::find_if(roofs, [&](const Roof& candidate) {
      return candidate.executor->num_threads() == contender.threads();
    });
    return spread_of(roof->gflops).median;
  }
};

std::vector<BenchShape> chosen_shapes(const BenchOptions& options) {
  std::vector<BenchShape> shapes = bench_shapes();
  std::erase_if(shapes, [&](const BenchShape& shape) {
    return (shape.group + ": " + shape.attention_case.name).find(options.filter) ==
           std::string::npos;
  });
  if (shapes.empty()) {
    throw UsageError(fmt::format("--filter {}: no shape has this in its name", options.filter));
  }
  return shapes;
}

std::vector<std::shared_ptr<Executor>> executors_of(const BenchOptions& options) {
  std::vector<int> counts = options.threads;
  if (counts.empty()) counts = {1, Executor::shared()->num_threads()};
  std::ranges::sort(counts);
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  std::vector<std::shared_ptr<Executor>> executors;
  executors.reserve(counts.size());
  for (const int count : counts) executors.push_back(std::make_shared<Executor>(count));
  return executors;
}

BenchResult measure(const BenchOptions& options) {
  const std::vector<BenchShape> shapes = chosen_shapes(options);
  BenchResult result;
  for (const auto& executor : executors_of(options)) {
    for (const BenchShape& shape : shapes) {
      result.contenders.emplace_back(shape, options.kernel, executor);
    }
    result.roofs.push_back({executor, result.contenders.back().kernel(), {}});
  }
  const auto steps = static_cast<int64_t>(result.contenders.size()) * options.rounds;
  Progress progress(steps, "measurements", !options.json.to_stdout());
  int64_t done = 0;
  for (int round = 0; round < options.rounds; ++round) {
    for (Roof& roof : result.roofs) {
      roof.gflops.push_back(cpu::measure_fma_gflops(roof.kernel, *roof.executor));
    }
    for (Contender& contender : result.contenders) {
      contender.time_round(options.quick ? kSecondsOfAQuickRound : kSecondsOfARound);
      progress.show(++done, contender.shape().attention_case.name);
    }
  }
  return result;
}

std::string table_of(const BenchResult& result) {
  Table table({"shape", "threads", "us", "quartiles", "GFLOP/s", "of the roof", "GB/s", "error"});
  for (const Contender& contender : result.contenders) {
    const Spread seconds = contender.seconds();
    const double gflops = contender.shape().flops() / seconds.median * 1e-9;
    table.add(
        {contender.shape().attention_case.name, std::to_string(contender.threads()),
         fmt::format("{:.0f}", seconds.median * 1e6),
         fmt::format("{:.0f}-{:.0f}", seconds.low * 1e6, seconds.high * 1e6),
         fmt::format("{:.1f}", gflops), fmt::format("{:.2f}", gflops / result.roof_of(contender)),
         fmt::format("{:.2f}", contender.shape().bytes() / seconds.median * 1e-9),
         contender.fault().empty() ? fmt::format("{:.1e}", contender.max_abs_error()) : "WRONG"});
  }
  std::string text = table.text();
  for (const Roof& roof : result.roofs) {
    text += fmt::format("fp32 roof on {} threads: {:.1f} GFLOP/s\n", roof.executor->num_threads(),
                        spread_of(roof.gflops).median);
  }
  return text;
}

Json json_of(const Contender& contender, double roof) {
  const Spread seconds = contender.seconds();
  const double gflops = contender.shape().flops() / seconds.median * 1e-9;
  const cases::AttentionCase& c = contender.shape().attention_case;
  return {{"group", contender.shape().group},
          {"shape", c.name},
          {"kernel", contender.kernel()},
          {"threads", contender.threads()},
          {"median_us", seconds.median * 1e6},
          {"first_quartile_us", seconds.low * 1e6},
          {"third_quartile_us", seconds.high * 1e6},
          {"gflops", gflops},
          {"share_of_roof", gflops / roof},
          {"gbytes_per_s", contender.shape().bytes() / seconds.median * 1e-9},
          {"max_abs_error", contender.max_abs_error()},
          {"fault", contender.fault()}};
}

Json json_of(const BenchOptions& options, const BenchResult& result) {
  const Machine machine = describe_machine();
  Json json = {{"version", version()},
               {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
               {"note", options.note},
               {"cpu_model", machine.cpu_model},
               {"usable_cores", machine.usable_cores},
               {"isa_flags", machine.isa_flags},
               {"rounds", options.rounds}};
  json["roofs"] = Json::array();
  for (const Roof& roof : result.roofs) {
    json["roofs"].push_back({{"threads", roof.executor->num_threads()},
                             {"fp32_gflops", spread_of(roof.gflops).median}});
  }
  json["results"] = Json::array();
  for (const Contender& contender : result.contenders) {
    json["results"].push_back(json_of(contender, result.roof_of(contender)));
  }
  return json;
}

int run_bench(BenchOptions options) {
  if (options.calibrate) throw UsageError("--calibrate: it is for a GPU (--device cuda)");
  if (!options.peers.empty()) throw UsageError("--peer: peers run on a GPU (--device cuda)");
  if (options.quick) options.rounds = 1;
  const BenchResult result = measure(options);
  if (!options.json.to_stdout()) fmt::print("{}", table_of(result));
  write_json(options.json, json_of(options, result));
  int status = kDone;
  for (const Contender& contender : result.contenders) {
    if (contender.fault().empty()) continue;
    fmt::print(stderr, "mla: {}: {}\n", contender.shape().attention_case.name, contender.fault());
    status = kCheckFailed;
  }
  return status;
}

}  // namespace

void add_bench_command(CLI::App& app, int& status) {
  CLI::App* command =
      app.add_subcommand("bench", "times the attention against this machine's limits");
  const auto options = std::make_shared<BenchOptions>();
  command->add_option("--device", options->device, "cpu, cuda or cuda:N")
      ->transform(device_option())
      ->capture_default_str();
  CLI::Option* filter = command->add_option("--filter", options->filter,
                                            "only shapes with this in their name or group");
  command->add_option("--rounds", options->rounds, "interleaved rounds")
      ->transform(whole_number(1, 1000))
      ->capture_default_str();
  command
      ->add_option("--threads", options->threads,
                   "thread counts, on the CPU (1, and all processors)")
      ->transform(whole_number(1, 1024))
      ->delimiter(',');
  CLI::Option* kernel = command->add_option("--kernel", options->kernel,
                                            "a kernel of `mla doctor` (the first that accepts)");
  CLI::Option* peer =
      command
          ->add_option("--peer", options->peers,
                       "a library behind tools/mla/peer.h, timed in turn; may be repeated")
          ->type_name("FILE.so");
  command->add_option("--note", options->note, "goes into the JSON: a commit, a machine");
  command->add_flag("--quick", options->quick, "one short round: shows that it works");
  command
      ->add_flag("--calibrate", options->calibrate,
                 "measures the planner's costs of the Hopper kernel instead")
      ->excludes(filter)
      ->excludes(kernel)
      ->excludes(peer);
  add_json_option(*command, options->json);
  command->callback([options, &status] {
    if (!options->threads.empty() && options->device != "cpu") {
      throw UsageError("--threads: they are of the CPU, and --device is " + options->device);
    }
    check_writable(options->json);
    const Device device = find_device(options->device, "bench");
    if (device.kind == DeviceKind::kCpu) {
      status = run_bench(*options);
      return;
    }
    const DeviceBenchOptions on_device{.device = device,
                                       .filter = options->filter,
                                       .kernel = options->kernel,
                                       .note = options->note,
                                       .peers = options->peers,
                                       .rounds = options->quick ? 1 : options->rounds,
                                       .json = options->json};
    status = options->calibrate ? run_calibration(on_device) : run_device_bench(on_device);
  });
}

}  // namespace mla::cli
