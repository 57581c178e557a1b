#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cases/case_json.hpp"
#include "cases/check.hpp"
#include "mla/command.hpp"
#include "mla/device_option.hpp"
#include "mla/error.hpp"
#include "mla/number_option.hpp"
#include "mla/output.hpp"
#include "mla/usage_error.hpp"

namespace mla::cli {
namespace {

struct CaseOptions {
  std::string device = "cpu";
  std::string file;
  int64_t max_rows = 4096;
  int threads = 0;
  JsonTarget json;
};

std::string read_text(const std::string& path) {
  constexpr std::streamsize kLargest = 64 << 20;  // bytes; a million rows with their pages fit
  std::ifstream file(path, std::ios::binary);
  if (!file) throw UsageError(fmt::format("{}: {}", path, std::strerror(errno)));
  std::string text(static_cast<size_t>(kLargest) + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad() || (file.fail() && !file.eof())) {
    throw UsageError(fmt::format("{}: {}", path, std::strerror(errno)));
  }
  if (file.gcount() > kLargest) {
    throw UsageError(fmt::format("{}: expected at most {} bytes", path, kLargest));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

Json to_json(const cases::AttentionCase& c, const cases::CheckReport& report) {
  return {{"name", c.name},
          {"status", report ? "ok" : "fault"},
          {"fault", report.fault},
          {"kernel", report.kernel},
          {"rows", report.plan.num_rows},
          {"tokens", report.plan.num_tokens},
          {"tiles", report.plan.num_tiles},
          {"splits", report.plan.num_splits},
          {"scratch_bytes", report.scratch_bytes},
          {"checked_rows", report.checked_rows},
          {"max_abs_error", report.max_abs_error},
          {"max_lse_error", report.max_lse_error},
          {"worst_share_of_bound", report.worst_share}};
}

void print(const cases::AttentionCase& c, const cases::CheckReport& report) {
  if (!c.name.empty()) fmt::print("case    {}\n", c.name);
  fmt::print("kernel  {}\n", report.kernel);
  fmt::print("plan    {} rows, {} query tokens, {} tiles, at most {} splits of a row\n",
             report.plan.num_rows, report.plan.num_tokens, report.plan.num_tiles,
             report.plan.num_splits);
  fmt::print("checked {} of {} output rows\n", report.checked_rows,
             static_cast<int64_t>(report.out.size()) / c.geometry.kv_lora_rank);
  fmt::print("error   output {:.3g}, LSE {:.3g}, at worst {:.3f} of the bound\n",
             report.max_abs_error, report.max_lse_error, report.worst_share);
  fmt::print("{}\n", report ? "ok" : "FAULT   " + report.fault);
}

// The library's answer to a case that it does not serve.
int print_refusal(const cases::AttentionCase& c, const Error& error, const JsonTarget& json) {
  fmt::print(stderr, "mla: refused: {}\n", error.what());
  const ErrorParts& parts = error.parts();
  write_json(json, {{"name", c.name},
                    {"status", "refused"},
                    {"refusal",
                     {{"where", parts.where},
                      {"what", parts.what},
                      {"expected", parts.expected},
                      {"got", parts.got}}}});
  return kBadUsage;
}

int run_case(const CaseOptions& options) {
  cases::AttentionCase c;
  try {
    c = cases::parse_case(read_text(options.file));
  } catch (const InvalidArgument& error) {
    throw UsageError(fmt::format("{}: {}", options.file, error.what()));
  }
  c.device = parse_device(options.device);
  cases::CheckReport report;
  try {
    report = cases::check_case(
        c, {.max_rows = options.max_rows, .executor = std::make_shared<Executor>(options.threads)});
  } catch (const Error& error) {
    return print_refusal(c, error, options.json);
  }
  if (!options.json.to_stdout()) print(c, report);
  write_json(options.json, to_json(c, report));
  return report ? kDone : kCheckFailed;
}

}  // namespace

void add_case_command(CLI::App& app, int& status) {
  CLI::App* command =
      app.add_subcommand("case", "runs one attention case from a JSON file against the reference");
  const auto options = std::make_shared<CaseOptions>();
  command->add_option("FILE", options->file, "the case, as docs/case_format.md describes it")
      ->required();
  command->add_option("--device", options->device, "cpu, cuda or cuda:N")
      ->transform(device_option())
      ->capture_default_str();
  command->add_option("--rows", options->max_rows, "output rows to compare at most")
      ->transform(whole_number(1, INT64_MAX))
      ->capture_default_str();
  command->add_option("--threads", options->threads, "threads; 0: one for each processor")
      ->transform(whole_number(0, 1024))
      ->capture_default_str();
  add_json_option(*command, options->json);
  command->callback([options, &status] {
    check_writable(options->json);
    status = run_case(*options);
  });
}

}  // namespace mla::cli
