#include "mla/ceilings.hpp"

#include <algorithm>

#include "mla/bench_kernels.hpp"
#include "mla/captured_runs.hpp"
#include "mla/device_memory.hpp"

namespace mla::cli {
namespace {

constexpr size_t kReadBytes = size_t{1} << 30;
constexpr int64_t kEmptyNodes = 1000;
constexpr int kRounds = 5;
constexpr double kRoundSeconds = 0.02;

double best_us(CapturedRuns& runs) {
  runs.warm_up(kRoundSeconds);
  double best = runs.time_round();
  for (int round = 1; round < kRounds; ++round) best = std::min(best, runs.time_round());
  return best;
}

}  // namespace

Ceilings measure_ceilings(Device device) {
  const DeviceStream stream(device);
  Ceilings ceilings;
  {
    DeviceMemory memory(device, kReadBytes);
    memory.fill(1, stream);
    queue_read(memory.data(), kReadBytes, device, stream);  // its code is loaded by that
    CapturedRuns reads(device, stream, 4,
                       [&](int64_t) { queue_read(memory.data(), kReadBytes, device, stream); });
    ceilings.read_gbps = static_cast<double>(kReadBytes) / best_us(reads) * 1e-3;
  }
  queue_nothing(device, stream);
  CapturedRuns empty(device, stream, kEmptyNodes, [&](int64_t) { queue_nothing(device, stream); });
  ceilings.empty_node_us = best_us(empty);
  ceilings.matrix_tflops = measure_matrix_tflops(device);
  return ceilings;
}

}  // namespace mla::cli
