#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mla/attention_resource.hpp"
#include "mla/content.hpp"
#include "mla/device_memory.hpp"
#include "mla/kv_resource.hpp"
#include "mla/pool.hpp"
#include "mla/replay_options.hpp"
#include "mla/replay_stats.hpp"
#include "mla/row_checker.hpp"
#include "mla/step.hpp"
#include "mla/step_item.hpp"
#include "mla/step_runner.hpp"
#include "mla/step_tensors.hpp"

namespace mla::cli {

/// Takes steps through a StepRunner over the KV resource and an attention resource, as an engine
/// does: admits them, plans them once, then for each layer draws the new rows, writes them to the
/// pool and attends; commits, and trims the rejected drafts. Sampled outputs go to the checker. On
/// a GPU each of these is waited for, so that its time is its own.
class StepExecutor {
 public:
  /// The references are lent. Takes all memory that steps within the options' budget need.
  /// Throws InvalidArgument where no kernel serves the shape.
  StepExecutor(const ReplayOptions& options, const std::vector<Request>& requests,
               const LatentPool& pool, KvResource& kv);

  /// Memory of the tensors of the largest step.
  static int64_t buffer_bytes(const ReplayOptions& options);

  /// Reserves what the step needs, or says how many pages are short and changes nothing.
  AdmitResult admit(const std::vector<StepItem>& items);
  /// Computes the step that was admitted. Adds to the times, the work done and the results of
  /// checks. Returns the seconds that the step took, without drawing rows and checking.
  double run(const std::vector<StepItem>& items, ReplayStats& stats);

  const std::string& kernel() const { return attention_.kernel(); }
  Executor& executor() { return *executor_; }
  int num_threads() const { return executor_->num_threads(); }
  const RowChecker& checker() const { return checker_; }

 private:
  void lay_out_tokens(const std::vector<StepItem>& items);
  void draw(int32_t layer);
  void run_layer(int32_t layer, const StepViews& views, ReplayStats& times);
  void commit(const std::vector<StepItem>& items);
  void count_work(const std::vector<StepItem>& items, ReplayStats& stats) const;

  /// A token of the step.
  struct Token {
    uint64_t content;
    int64_t position;
  };

  const std::vector<Request>& requests_;
  KvResource& kv_;
  int32_t num_layers_;
  Geometry geometry_;
  std::shared_ptr<Executor> executor_;
  DeviceStream stream_;  // that everything is queued on
  AttentionResource attention_;
  StepRunner runner_;
  Step step_;
  Content content_;
  RowChecker checker_;
  std::vector<Token> tokens_;
  std::vector<TokenKeys> keys_;  // of the tokens in the layer at work
  StepTensors tensors_;
};

}  // namespace mla::cli
