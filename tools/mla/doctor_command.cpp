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
#include "cuda/card.hpp"
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

/// Everything about one device of this machine.
struct DeviceReport {
  std::vector<KernelReport> kernels;
  std::vector<Support> models;  ///< of kModels

  bool ok() const {
    return std::ranges::all_of(kernels, [](const auto& kernel) { return kernel.fault.empty(); }) &&
           std::ranges::all_of(models, [](const auto& support) { return bool{support}; });
  }
};

KernelReport report_on(const KernelVerdict& verdict, Device device) {
  KernelReport report;
  report.verdict = verdict;
  if (!verdict.refusal.empty()) return report;
  for (cases::AttentionCase& attention_case : self_check_cases()) {
    attention_case.kernel = verdict.kernel;
    attention_case.device = device;
    if (!supports(attention_case.geometry, device, {}, verdict.kernel)) continue;
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

DeviceReport report_on(Device device) {
  DeviceReport report;
  for (const ModelShape& model : kModels) {
    report.models.push_back(supports(model.geometry(), device));
  }
  for (const KernelVerdict& verdict : report.models.front().considered) {
    report.kernels.push_back(report_on(verdict, device));
  }
  return report;
}

std::string verdict_text(const KernelReport& report) {
  if (!report.verdict.refusal.empty()) return "does not run: " + report.verdict.refusal;
  if (!report.fault.empty()) return "FAILED: " + report.fault;
  return fmt::format("ok: {} rows checked, largest error {:.1e}, {:.2f} of what is allowed",
                     report.checked_rows, report.max_abs_error, report.worst_share);
}

std::string capability_text(const cuda::Card& card) {
  return fmt::format("{}.{}", card.compute_capability / 10, card.compute_capability % 10);
}

void print_machine(const Machine& machine, const std::vector<cuda::Card>& cards,
                   const std::string& missing) {
  fmt::print("libmla {}\n\n", version());
  fmt::print("CPU      {}, {} usable cores\n", machine.cpu_model, machine.usable_cores);
  fmt::print("flags    {}\n", fmt::join(machine.isa_flags, " "));
  fmt::print("memory   {:.1f} GiB, {:.1f} GiB available\n",
             static_cast<double>(machine.memory_bytes) / kGiB,
             static_cast<double>(machine.available_bytes) / kGiB);
  if (cards.empty()) fmt::print("cuda     no device: {}\n", missing);
  for (size_t i = 0; i < cards.size(); ++i) {
    const cuda::Card& card = cards[i];
    fmt::print(
        "cuda:{:<3} {}, compute capability {}, {} SMs, {:.1f} GiB; driver for CUDA {}, "
        "runtime {}\n",
        i, card.name, capability_text(card), card.num_sms,
        static_cast<double>(card.memory_bytes) / kGiB, card.driver_cuda_version,
        card.runtime_version);
  }
}

void print_device(const std::string& name, const DeviceReport& report) {
  fmt::print("\nkernels of {}, in order of preference, and their check against the reference\n",
             name);
  for (const KernelReport& kernel : report.kernels) {
    fmt::print("  {:<16} {}\n", kernel.verdict.kernel, verdict_text(kernel));
  }
  fmt::print(
      "\nmodel shapes (heads on this rank, latent, bf16, pages of 64) and who serves them\n");
  for (size_t i = 0; i < kModels.size(); ++i) {
    const ModelShape& model = kModels[i];
    const Support& support = report.models[i];
    fmt::print("  {:<28} {:>3}  {:>3}+{:<2}  {:<16} {}\n", model.name, model.num_heads,
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

// Adds "kernels" and "models".
void add_device(Json& json, const DeviceReport& report) {
  json["kernels"] = Json::array();
  for (const KernelReport& kernel : report.kernels) json["kernels"].push_back(to_json(kernel));
  json["models"] = Json::array();
  for (size_t i = 0; i < kModels.size(); ++i) {
    json["models"].push_back({{"name", kModels[i].name},
                              {"heads", kModels[i].num_heads},
                              {"kv_lora_rank", kModels[i].kv_lora_rank},
                              {"qk_rope_head_dim", kModels[i].qk_rope_head_dim},
                              {"kernel", report.models[i].kernel},
                              {"reason", report.models[i].reason}});
  }
}

Json to_json(const cuda::Card& card, const DeviceReport& report) {
  Json json = {{"name", card.name},
               {"compute_capability", capability_text(card)},
               {"sms", card.num_sms},
               {"memory_bytes", card.memory_bytes},
               {"driver_version", card.driver_version},
               {"driver_cuda_version", card.driver_cuda_version},
               {"runtime_version", card.runtime_version}};
  add_device(json, report);
  return json;
}

int run_doctor(const JsonTarget& target) {
  const Machine machine = describe_machine();
  std::string missing;
  const std::vector<cuda::Card> cards = cuda::describe_cards(missing);
  const DeviceReport cpu = report_on(Device{});
  std::vector<DeviceReport> gpus;
  for (size_t i = 0; i < cards.size(); ++i) {
    gpus.push_back(report_on(Device{DeviceKind::kCuda, static_cast<int32_t>(i)}));
  }
  const bool ok = cpu.ok() && std::ranges::all_of(gpus, &DeviceReport::ok);

  if (!target.to_stdout()) {
    print_machine(machine, cards, missing);
    print_device("the CPU", cpu);
    for (size_t i = 0; i < gpus.size(); ++i) print_device(fmt::format("cuda:{}", i), gpus[i]);
  }
  Json json = {{"version", version()}, {"machine", to_json(machine)}};
  add_device(json, cpu);
  json["cuda"] = {{"missing", missing}, {"devices", Json::array()}};
  for (size_t i = 0; i < cards.size(); ++i) {
    json["cuda"]["devices"].push_back(to_json(cards[i], gpus[i]));
  }
  json["ok"] = ok;
  write_json(target, json);
  return ok ? kDone : kCheckFailed;
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
