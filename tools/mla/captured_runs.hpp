#pragma once

#include <cstdint>
#include <functional>

#include "device/runtime.hpp"
#include "mla/device.hpp"

namespace mla::cli {

/// Runs of one piece of work, captured in a graph that is replayed to time them.
class CapturedRuns {
 public:
  /// `run` queues the run of an index below `num_runs` on the stream. Throws what it throws, and
  /// CudaError where the work can not be captured.
  CapturedRuns(Device device, Stream stream, int64_t num_runs,
               const std::function<void(int64_t index)>& run);
  ~CapturedRuns() { runtime_.destroy_graph(graph_); }
  CapturedRuns(const CapturedRuns&) = delete;
  CapturedRuns& operator=(const CapturedRuns&) = delete;

  /// Replays until all is warm and chooses how often a round of so many seconds replays.
  void warm_up(double round_seconds);
  /// Microseconds of one run in a round.
  double time_round();

 private:
  double replay(int64_t count);  // seconds

  device::Runtime& runtime_;
  Stream stream_;
  int64_t num_runs_;
  int64_t num_replays_ = 1;
  device::Graph graph_{};
};

}  // namespace mla::cli
