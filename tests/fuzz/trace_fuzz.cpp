// The reader of traces takes any bytes: it reads requests that a replay can serve, or refuses with
// the line. What it reads scales to a workload whose prompts are covered by their blocks.
#include <cstdint>
#include <sstream>
#include <string>

#include "mla/trace.hpp"
#include "mla/usage_error.hpp"
#include "mla/workload.hpp"

namespace {

void check_workload(const std::vector<mla::cli::TraceRequest>& trace, double scale) {
  for (const mla::cli::Request& request : mla::cli::make_workload(trace, scale)) {
    const bool covered = request.prompt_tokens <=
                         static_cast<int64_t>(request.block_keys.size()) * request.block_tokens;
    if (!covered || request.prompt_tokens < 1 || request.output_tokens < 1) __builtin_trap();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data,
                                      size_t size) {  // NOLINT: libFuzzer's name
  std::istringstream lines(std::string(reinterpret_cast<const char*>(data), size));
  try {
    const auto trace = mla::cli::read_trace(lines, "trace");
    for (const double scale : {1e-6, 0.1, 1.0, 3.7}) check_workload(trace, scale);
  } catch (const mla::cli::UsageError&) {  // refused
  }
  return 0;
}
