#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cases/layer_case.hpp"
#include "mla/command.hpp"
#include "mla/device_option.hpp"
#include "mla/number_option.hpp"
#include "mla/output.hpp"
#include "mla/supports.hpp"

namespace mla::cli {
namespace {

struct LayerArguments {
  std::string path;
  std::string device = "cpu";
  std::string dtype = "fp32";
  std::string kernel;
  int32_t page_size = 64;
  int threads = 0;
  JsonTarget json{.wanted = true, .path = {}};
};

// The configuration's softmax scale is fp32, so that it may be off by 2^-24 of itself.
constexpr double kMostScaleError = 1e-6;

DType dtype_named(const std::string& name) {
  if (name == "bf16") return DType::kBFloat16;
  return name == "fp16" ? DType::kFloat16 : DType::kFloat32;
}

int run(const LayerArguments& arguments) {
  const Device device = find_device(arguments.device, "layer");
  const cases::LayerFile file(arguments.path);
  const cases::LayerRun run{
      .dtype = dtype_named(arguments.dtype),
      .device = device,
      .page_size = arguments.page_size,
      .heads = {},
      .kernel = arguments.kernel,
      .executor = arguments.threads > 0 ? std::make_shared<Executor>(arguments.threads) : nullptr};
  const double bound = cases::error_bound(file, run.dtype);
  const double scale_error = std::abs(double{file.config.sm_scale} / file.scaling - 1);
  bool passed = scale_error <= kMostScaleError;
  Json errors;
  const auto try_way = [&](const char* name, const cases::LayerSchedule& schedule) {
    const double error = max_rel_error(file, run_layer(file, run, schedule)[0]);
    passed = passed && error <= bound;
    errors[name] = error;  // null where an output is not finite
  };
  try_way("one_pass", one_pass(file));
  try_way("chunks", in_chunks(file));
  try_way("token_by_token", token_by_token(file));

  const Geometry geometry{.num_heads = file.config.num_attention_heads,
                          .kv_lora_rank = file.config.kv_lora_rank,
                          .qk_rope_head_dim = file.config.qk_rope_head_dim,
                          .page_size = run.page_size,
                          .dtype = run.dtype,
                          .kv_dtype = run.dtype};
  write_json(arguments.json,
             {{"file", arguments.path},
              {"model_type", file.config.model_type},
              {"tokens", file.num_tokens},
              {"device", arguments.device},
              {"dtype", arguments.dtype},
              {"page_size", run.page_size},
              {"kernel", supports(geometry, run.device, std::nullopt, run.kernel).kernel},
              {"sm_scale", file.config.sm_scale},
              {"sm_scale_rel_error", scale_error},
              {"bound", bound},
              {"max_rel_error", errors},
              {"passed", passed}});
  return passed ? kDone : kCheckFailed;
}

}  // namespace

void add_layer_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand(
      "layer", "runs an attention layer's file in one pass, in chunks and token by token");
  const auto arguments = std::make_shared<LayerArguments>();
  command->add_option("file", arguments->path, "safetensors file, see docs/layer.md")->required();
  command->add_option("--device", arguments->device, "where to run: cpu, cuda or cuda:N")
      ->transform(device_option())
      ->capture_default_str();
  command->add_option("--dtype", arguments->dtype, "of the activations and the cache; fp16 on CUDA")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command->add_option("--page-size", arguments->page_size, "tokens of a page")
      ->transform(whole_number(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--kernel", arguments->kernel,
                      "attention kernel; the first fit if not given");
  command->add_option("--threads", arguments->threads, "0: all processors")
      ->transform(whole_number(0, 1024))
      ->capture_default_str();
  add_json_option(*command, arguments->json);
  command->callback([arguments, &status] {
    check_writable(arguments->json);
    status = run(*arguments);
  });
}

}  // namespace mla::cli
