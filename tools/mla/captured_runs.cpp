#include "mla/captured_runs.hpp"

#include <algorithm>

#include "mla/clock.hpp"

namespace mla::cli {

CapturedRuns::CapturedRuns(Device device, Stream stream, int64_t num_runs,
                           const std::function<void(int64_t index)>& run)
    : runtime_(device::runtime_of(device)), stream_(stream), num_runs_(num_runs) {
  runtime_.begin_capture(stream_);
  try {
    for (int64_t index = 0; index < num_runs_; ++index) run(index);
  } catch (...) {
    device::quietly([this] { runtime_.destroy_graph(runtime_.end_capture(stream_)); });
    throw;
  }
  graph_ = runtime_.end_capture(stream_);
}

void CapturedRuns::warm_up(double round_seconds) {
  replay(2);
  num_replays_ = std::clamp<int64_t>(static_cast<int64_t>(round_seconds / replay(1)), 1, 10000);
}

double CapturedRuns::time_round() {
  return replay(num_replays_) / static_cast<double>(num_replays_ * num_runs_) * 1e6;
}

double CapturedRuns::replay(int64_t count) {
  const double begin = now_s();
  for (int64_t i = 0; i < count; ++i) runtime_.replay(graph_, stream_);
  runtime_.synchronize(stream_);
  return now_s() - begin;
}

}  // namespace mla::cli
