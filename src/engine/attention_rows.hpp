#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "mla/attention_resource.hpp"
#include "mla/batch.hpp"
#include "mla/kv_step.hpp"

namespace mla::engine {

/// What one label's plan object gets for one pass. Its arrays are the KV plan's where the pass sees
/// all of them, else its own.
struct PassRows {
  std::string_view label;
  int32_t pass = 0;
  bool causal = true;
  Batch batch{};
  std::vector<int32_t> qo_indptr, kv_indptr, kv_indices, kv_len;
};

/// All passes over all labels of a step. Kept from step to step, so that it stops allocating.
class StepRows {
 public:
  /// Throws InvalidArgument naming the pass and the label or segment: a pass without label, a
  /// label in no pass, other counts of segments than rows, negative query counts, more appended
  /// rows than there are, more than 2^31 - 1 queries.
  void lay_out(const KvPlan& kv, std::span<const AttentionPass> passes, int64_t page_size);

  std::span<const PassRows> rows() const { return std::span(rows_).first(count_); }

 private:
  PassRows& next();

  std::vector<PassRows> rows_;
  size_t count_ = 0;
};

}  // namespace mla::engine
