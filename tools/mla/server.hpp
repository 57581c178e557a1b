#pragma once

#include <cstdint>
#include <vector>

#include "mla/kv_resource.hpp"
#include "mla/pool.hpp"
#include "mla/replay_options.hpp"
#include "mla/replay_stats.hpp"
#include "mla/scheduler.hpp"
#include "mla/step_executor.hpp"
#include "mla/workload.hpp"

namespace mla::cli {

/// A small serving engine: it serves a workload step by step from a bounded pool. Each step is
/// chosen (scheduler), admitted (requests are put back while pages are short), executed and
/// accounted for.
class Server {
 public:
  /// `requests` is lent. Throws UsageError where a request does not fit alone in the pool or the
  /// pool does not fit in memory, InvalidArgument where the device is not there or no kernel of it
  /// serves the shape.
  Server(const ReplayOptions& options, const std::vector<Request>& requests);

  bool done() const { return scheduler_.done(); }
  /// One step; or, where the arrival times are obeyed and nothing is at work, a short sleep.
  void step();
  /// Lets go of the requests at work (there are some after an interrupt) and of the prefix index,
  /// and counts the pages that are not free then. No step may follow.
  void finish();

  const ReplayStats& stats() const { return stats_; }
  const RowChecker& checker() const { return executor_.checker(); }
  const std::string& kernel() const { return executor_.kernel(); }
  /// Prompt and output tokens that are computed or were found in the cache, of total_tokens().
  int64_t served_tokens() const;
  int64_t num_requests() const { return static_cast<int64_t>(requests_.size()); }
  Executor& executor() { return executor_.executor(); }
  int num_threads() const { return executor_.num_threads(); }
  int64_t total_tokens() const { return total_tokens_; }
  int64_t num_running() const { return static_cast<int64_t>(scheduler_.running().size()); }

 private:
  std::vector<StepItem> admit_step();
  void start_waiting(std::vector<StepItem>& items);
  bool has_room(int64_t request) const;
  void put_back_last(std::vector<StepItem>& items, size_t num_old);
  void account(const std::vector<StepItem>& items);

  const ReplayOptions& options_;
  const std::vector<Request>& requests_;
  int64_t total_tokens_;
  LatentPool pool_;
  KvResource kv_;
  Scheduler scheduler_;
  StepExecutor executor_;
  ReplayStats stats_;
  double begin_s_;
};

/// Usable pages of the options' pool.
int64_t pool_pages(const ReplayOptions& options);

}  // namespace mla::cli
