#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "mla/attention.hpp"
#include "mla/content.hpp"
#include "mla/kv_resource.hpp"
#include "mla/pool.hpp"
#include "mla/replay_options.hpp"
#include "mla/replay_stats.hpp"
#include "mla/row_checker.hpp"
#include "mla/scheduler.hpp"

namespace mla::cli {

/// Computes an admitted step: plans it once, then for each layer draws the new rows, writes them
/// to the pool and attends, and commits. Sampled outputs go to the checker.
class StepExecutor {
 public:
  /// The references are lent. Takes all memory that steps within the options' budget need.
  /// Throws InvalidArgument where no kernel serves the shape.
  StepExecutor(const ReplayOptions& options, const std::vector<Request>& requests, LatentPool& pool,
               KvResource& kv);

  /// Host memory of the tensors of the largest step.
  static int64_t buffer_bytes(const ReplayOptions& options);

  /// Adds to the times, the work done and the results of checks. Returns the seconds that the step
  /// took, without drawing rows and checking.
  double run(const std::vector<StepItem>& items, ReplayStats& stats);

  const std::string& kernel() const { return attention_.kernel(); }
  Executor& executor() { return *executor_; }
  int num_threads() const { return executor_->num_threads(); }
  const RowChecker& checker() const { return checker_; }

 private:
  void lay_out_tokens(const std::vector<StepItem>& items);
  void draw(int32_t layer);
  void count_work(const std::vector<StepItem>& items, ReplayStats& stats) const;

  /// A query token of the step.
  struct Token {
    const Request* request;
    int64_t position;
  };

  const std::vector<Request>& requests_;
  LatentPool& pool_;
  KvResource& kv_;
  int32_t num_layers_;
  Geometry geometry_;
  PlanOptions plan_options_;
  std::shared_ptr<Executor> executor_;
  PagedAttention attention_;
  Content content_;
  RowChecker checker_;
  std::vector<Token> tokens_;
  std::vector<std::byte> rows_;     // [budget, latent]
  std::vector<std::byte> queries_;  // [budget, heads, latent]
  std::vector<std::byte> out_;      // [budget, heads, rank]
  std::vector<float> lse_;          // [budget, heads]
};

}  // namespace mla::cli
