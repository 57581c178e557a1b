#include "mla/replay_report.hpp"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "cuda/card.hpp"
#include "mla/machine.hpp"
#include "mla/version.hpp"

namespace mla::cli {
namespace {

double ms(double seconds) { return 1e3 * seconds; }

// "12.3 GFLOP/s (45 % of 27.3)"
std::string rate_text(double rate, const char* unit, double roof) {
  std::string text = fmt::format("{:.1f} {}", rate, unit);
  if (roof > 0) text += fmt::format(" ({:.0f} % of {:.1f})", 100 * rate / roof, roof);
  return text;
}

// The processor or GPU behind a device.
std::string model_of(Device device) {
  if (device.kind == DeviceKind::kCpu) return describe_machine().cpu_model;
  return cuda::describe_card(device.index).name;
}

}  // namespace

std::string replay_table(const ReplayOptions& options, const Server& server, const Roofs& roofs) {
  const ReplayStats& stats = server.stats();
  std::string text;
  const auto row = [&text](const char* name, const std::string& value) {
    text += fmt::format("{:<22} {}\n", name, value);
  };
  row("requests finished", fmt::format("{} of {}", stats.requests_finished, server.num_requests()));
  row("requests failed", fmt::format("{}", stats.requests_failed));
  row("prefill tokens", fmt::format("{} computed, {} found in the prefix index",
                                    stats.prefill_tokens, stats.hit_tokens));
  row("decode tokens", fmt::format("{}", stats.decode_tokens));
  if (options.num_drafts > 0) {
    row("drafts", fmt::format("{}: {} accepted, {} rejected", stats.drafted_tokens,
                              stats.accepted_tokens, stats.rejected_tokens()));
  }
  row("prefix hit rate", fmt::format("{:.1f} %", 100 * stats.prefix_hit_rate()));
  row("preemptions",
      fmt::format("{}, {} tokens computed again", stats.preemptions, stats.recomputed_tokens));
  row("peak pages", fmt::format("{} of {}, {} tokens each", stats.peak_pages, pool_pages(options),
                                options.page_size));
  row("pages leaked", fmt::format("{}", stats.pages_leaked));
  row("steps", fmt::format("{}, p50 {:.2f} ms, p95 {:.2f} ms, p99 {:.2f} ms", stats.step_s.size(),
                           ms(stats.step_percentile_s(0.50)), ms(stats.step_percentile_s(0.95)),
                           ms(stats.step_percentile_s(0.99))));
  row("time",
      fmt::format("{:.2f} s: attention {:.2f}, append {:.2f}, plan {:.3f}, schedule {:.3f}; "
                  "drawing rows {:.2f}, checks {:.2f}",
                  stats.wall_s, stats.attention_s, stats.append_s, stats.plan_s, stats.schedule_s,
                  stats.generate_s, stats.check_s));
  const bool on_cpu = options.device == Device{};
  row("device", fmt::format("{}, {}", to_string(options.device), model_of(options.device)));
  row("attention",
      fmt::format("{}, {}, kernel {}{}",
                  rate_text(stats.gflops(), "GFLOP/s", roofs ? roofs->fma_gflops : 0),
                  rate_text(stats.gbytes_per_s(), "GB/s", roofs ? roofs->dram_read_gbps : 0),
                  server.kernel(),
                  on_cpu ? fmt::format(", {} threads", server.num_threads()) : ""));
  row("largest error",
      fmt::format("{:.2e}, of the LSE {:.2e}: {:.2f} of what the contract allows",
                  stats.max_abs_error, stats.max_lse_error, stats.max_bound_share));
  row("checked rows", fmt::format("{}, of {} of {} requests", stats.checked_rows,
                                  stats.checked_requests, server.num_requests()));
  return text;
}

Json replay_json(const ReplayOptions& options, const Server& server, const Roofs& roofs) {
  const ReplayStats& stats = server.stats();
  Json json = {
      {"version", version()},
      {"trace", options.trace},
      {"length_scale", options.length_scale},
      {"heads", options.num_heads},
      {"layers", options.num_layers},
      {"kv_lora_rank", options.kv_lora_rank},
      {"qk_rope_head_dim", options.qk_rope_head_dim},
      {"page_size", options.page_size},
      {"pages", pool_pages(options)},
      {"token_budget", options.token_budget},
      {"speculate", options.num_drafts},
      {"dtype", name_of(options.dtype)},
      {"device", to_string(options.device)},
      {"device_model", model_of(options.device)},
      {"threads", server.num_threads()},
      {"seed", options.seed},
      {"kernel", server.kernel()},
      {"requests_finished", stats.requests_finished},
      {"requests_failed", stats.requests_failed},
      {"prefill_tokens", stats.prefill_tokens},
      {"decode_tokens", stats.decode_tokens},
      {"drafted_tokens", stats.drafted_tokens},
      {"accepted_tokens", stats.accepted_tokens},
      {"rejected_tokens", stats.rejected_tokens()},
      {"prefix_hit_tokens", stats.hit_tokens},
      {"prefix_hit_rate", stats.prefix_hit_rate()},
      {"recomputed_tokens", stats.recomputed_tokens},
      {"preemptions", stats.preemptions},
      {"peak_pages", stats.peak_pages},
      {"pages_leaked", stats.pages_leaked},
      {"steps", stats.step_s.size()},
      {"step_ms_p50", ms(stats.step_percentile_s(0.50))},
      {"step_ms_p95", ms(stats.step_percentile_s(0.95))},
      {"step_ms_p99", ms(stats.step_percentile_s(0.99))},
      {"schedule_ms", ms(stats.schedule_s)},
      {"plan_ms", ms(stats.plan_s)},
      {"append_ms", ms(stats.append_s)},
      {"attention_ms", ms(stats.attention_s)},
      {"generate_ms", ms(stats.generate_s)},
      {"check_ms", ms(stats.check_s)},
      {"wall_ms", ms(stats.wall_s)},
      {"attention_gflops", stats.gflops()},
      {"attention_gbytes_per_s", stats.gbytes_per_s()},
      {"checked_rows", stats.checked_rows},
      {"checked_requests", stats.checked_requests},
      {"max_abs_error", stats.max_abs_error},
      {"max_lse_error", stats.max_lse_error},
      {"max_bound_share", stats.max_bound_share},
      {"output_digest", fmt::format("{:016x}", stats.output_digest)},
  };
  if (roofs) {
    json["machine_gflops"] = roofs->fma_gflops;
    json["machine_gbytes_per_s"] = roofs->dram_read_gbps;
  }
  return json;
}

}  // namespace mla::cli
