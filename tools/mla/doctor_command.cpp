#include <fmt/core.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cases/check.hpp"
#include "mla/command.hpp"
#include "mla/error.hpp"
#include "mla/machine.hpp"
#include "mla/output.hpp"
#include "mla/supports.hpp"
#include "mla/version.hpp"

namespace mla::cli {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
constexpr int64_t kRowsCheckedOfACase = 48;

struct ModelShape {
  const char* name;
  int32_t num_heads;
  int32_t kv_lora_rank;
  int32_t qk_rope_head_dim;

  Geometry geometry() const {
    return {.num_heads = num_heads,
            .kv_lora_rank = kv_lora_rank,
            .qk_rope_head_dim = qk_rope_head_dim,
            .page_size = 64,
            .dtype = DType::kBFloat16,
            .kv_dtype = DType::kBFloat16};
  }
};

constexpr std::array<ModelShape, 8> kModels = {{
    {"DeepSeek-V2, V3", 128, 512, 64},
    {"DeepSeek-V2, V3, rank of 8", 16, 512, 64},
    {"Kimi K2", 64, 512, 64},
    {"Kimi K2, rank of 8", 8, 512, 64},
    {"GLM-4.x lite", 20, 512, 64},
    {"LongCat-Flash", 64, 512, 64},
    {"NoPE", 16, 512, 0},
    {"small test shape", 4, 64, 16},
}};

/// One kernel of the table on this machine, and its self-check where it runs.
struct KernelReport {
  KernelVerdict verdict;
  int64_t checked_rows = 0;
  double max_abs_error = 0;
  double worst_share = 0;  ///< of what the bounds allow
  std::string fault;
};

// Short cases that walk a kernel's paths: decode and several queries, pages that are scattered and
// partly filled, a row without keys, split keys, every dtype, widths that are no vector multiple.
std::vector<cases::AttentionCase> self_check_cases() {
  std::vector<cases::AttentionCase> list(4);
  list[0].name = "512+64 bf16 decode";
  list[0].q_lens = {1, 1, 1};
  list[0].kv_lens = {700, 0, 33};
  list[1].name = "512+64 fp16 causal chunk, forced splits";
  list[1].geometry.dtype = list[1].geometry.kv_dtype = DType::kFloat16;
  list[1].q_lens = {5, 2};
  list[1].kv_lens = {300, 130};
  list[1].causal = true;
  list[1].splits.forced_count = 3;
  list[2].name = "512+0 fp32 128 heads";
  list[2].geometry.num_heads = 128;
  list[2].geometry.qk_rope_head_dim = 0;
  list[2].geometry.page_size = 16;
  list[2].geometry.dtype = list[2].geometry.kv_dtype = DType::kFloat32;
  list[2].q_lens = {1};
  list[2].kv_lens = {129};
  list[3].name = "70+6 bf16 3 heads, page of 1";
  list[3].geometry.num_heads = 3;
  list[3].geometry.kv_lora_rank = 70;
  list[3].geometry.qk_rope_head_dim = 6;
  list[3].geometry.page_size = 1;
  list[3].q_lens = {1, 4};
  list[3].kv_lens = {65, 17};
  list[3].causal = true;
  return list;
}

KernelReport report_on(const KernelVerdict& verdict) {
  KernelReport report;
  report.verdict = verdict;
  if (!verdict.refusal.empty()) return report;
  for (cases::AttentionCase& attention_case : self_check_cases()) {
    attention_case.kernel = verdict.kernel;
    if (!supports(attention_case.geometry, {}, {}, verdict.kernel)) continue;
    std::string fault;
    try {
      const cases::CheckReport check =
          cases::check_case(attention_case, {.max_rows = kRowsCheckedOfACase});
      report.checked_rows += check.checked_rows;
      report.max_abs_error = std::max(report.max_abs_error, check.max_abs_error);
      report.worst_share = std::max(report.worst_share, check.worst_share);
      fault = check.fault;
    } catch (const Error& error) {  // what supports() accepts must run
      fault = error.what();
    }
    if (!fault.empty() && report.fault.empty()) report.fault = attention_case.name + ": " + fault;
  }
  return report;
}

std::string verdict_text(const KernelReport& report) {
  if (!report.verdict.refusal.empty()) return "does not run: " + report.verdict.refusal;
  if (!report.fault.empty()) return "FAILED: " + report.fault;
  return fmt::format("ok: {} rows checked, largest error {:.1e}, {:.2f} of what is allowed",
                     report.checked_rows, report.max_abs_error, report.worst_share);
}

void print_report(const Machine& machine, const std::vector<KernelReport>& kernels) {
  fmt::print("libmla {}\n\n", version());
  fmt::print("CPU      {}, {} usable cores\n", machine.cpu_model, machine.usable_cores);
  fmt::print("flags    {}\n", fmt::join(machine.isa_flags, " "));
  fmt::print("memory   {:.1f} GiB, {:.1f} GiB available\n",
             static_cast<double>(machine.memory_bytes) / kGiB,
             static_cast<double>(machine.available_bytes) / kGiB);
  fmt::print(
      "\nkernels of the CPU, in order of preference, and their check against the reference\n");
  for (const KernelReport& report : kernels) {
    fmt::print("  {:<14} {}\n", report.verdict.kernel, verdict_text(report));
  }
  fmt::print(
      "\nmodel shapes (heads on this rank, latent, bf16, pages of 64) and who serves them\n");
  for (const ModelShape& model : kModels) {
    const Support support = supports(model.geometry());
    fmt::print("  {:<28} {:>3}  {:>3}+{:<2}  {:<14} {}\n", model.name, model.num_heads,
               model.kv_lora_rank, model.qk_rope_head_dim, support ? support.kernel : "none",
               support.reason);
  }
}

Json to_json(const Machine& machine) {
  return {{"cpu_model", machine.cpu_model},
          {"usable_cores", machine.usable_cores},
          {"isa_flags", machine.isa_flags},
          {"memory_bytes", machine.memory_bytes},
          {"available_bytes", machine.available_bytes}};
}

Json to_json(const KernelReport& report) {
  Json json = {{"name", report.verdict.kernel}, {"runs", report.verdict.refusal.empty()}};
  if (!report.verdict.refusal.empty()) {
    json["refusal"] = report.verdict.refusal;
    return json;
  }
  json["ok"] = report.fault.empty();
  if (!report.fault.empty()) json["fault"] = report.fault;
  json["checked_rows"] = report.checked_rows;
  json["max_abs_error"] = report.max_abs_error;
  json["max_bound_share"] = report.worst_share;
  return json;
}

Json models_json() {
  Json models = Json::array();
  for (const ModelShape& model : kModels) {
    const Support support = supports(model.geometry());
    models.push_back({{"name", model.name},
                      {"heads", model.num_heads},
                      {"kv_lora_rank", model.kv_lora_rank},
                      {"qk_rope_head_dim", model.qk_rope_head_dim},
                      {"kernel", support.kernel},
                      {"reason", support.reason}});
  }
  return models;
}

int run_doctor(const JsonTarget& target) {
  const Machine machine = describe_machine();
  std::vector<KernelReport> kernels;
  for (const KernelVerdict& verdict : supports(kModels.front().geometry()).considered) {
    kernels.push_back(report_on(verdict));
  }
  const bool all_served = std::ranges::all_of(kModels, [](const ModelShape& model) {
    return static_cast<bool>(supports(model.geometry()));
  });
  const bool all_ok =
      std::ranges::all_of(kernels, [](const KernelReport& report) { return report.fault.empty(); });

  if (!target.to_stdout()) print_report(machine, kernels);
  Json json = {{"version", version()}, {"machine", to_json(machine)}};
  json["kernels"] = Json::array();
  for (const KernelReport& report : kernels) json["kernels"].push_back(to_json(report));
  json["models"] = models_json();
  json["ok"] = all_served && all_ok;
  write_json(target, json);
  return all_served && all_ok ? kDone : kCheckFailed;
}

}  // namespace

void add_doctor_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("doctor", "describes this machine and checks the kernels");
  const auto json = std::make_shared<JsonTarget>();
  add_json_option(*command, *json);
  command->callback([json, &status] {
    check_writable(*json);
    status = run_doctor(*json);
  });
}

}  // namespace mla::cli
