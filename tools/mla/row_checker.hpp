#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "mla/content.hpp"
#include "mla/executor.hpp"
#include "mla/geometry.hpp"
#include "mla/reference.hpp"
#include "mla/replay_options.hpp"
#include "mla/replay_stats.hpp"
#include "mla/row_sampler.hpp"
#include "mla/step_item.hpp"
#include "mla/step_tensors.hpp"

namespace mla::cli {

/// Checks sampled output rows of a replay against the reference in double. The keys are not read
/// from the pool but drawn again from the generator, so that a row in the wrong slot, a page shared
/// by mistake or a lost copy shows as well as a wrong sum.
class RowChecker {
 public:
  /// `executor` draws the keys and computes; `probability_rounding` is the kernel's, see
  /// cases::error_bound. The references are lent.
  RowChecker(const ReplayOptions& options, const Geometry& geometry, const Content& content,
             Executor& executor, double probability_rounding);
  ~RowChecker();
  RowChecker(const RowChecker&) = delete;
  RowChecker& operator=(const RowChecker&) = delete;

  /// Chooses the rows of a step that are checked.
  void choose(const std::vector<StepItem>& items);

  /// Checks those of `layer`, whose outputs the tensors have; none after an interrupt.
  void check(const std::vector<Request>& requests, int32_t layer, const StepTensors& tensors,
             Stream stream, ReplayStats& stats);

  /// Requests with a row outside of its bound, each once; and the first few rows in words.
  const std::vector<int64_t>& failed_requests() const { return failed_requests_; }
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  /// The reference over all keys that a thread drew again, block by block.
  struct Partial;
  /// Adds keys [begin, end) of the sample to a thread's partial result.
  void attend(const Request& request, const RowSample& sample, int64_t begin, int64_t end,
              Partial& partial) const;
  /// The reference of a sample into expected_, its keys shared out over the threads.
  ReferenceRow compute(const Request& request, const RowSample& sample);
  /// Compares the row in got_ with expected_.
  void compare(const RowSample& sample, const ReferenceRow& expected, float got_lse,
               ReplayStats& stats);
  void note_failure(const RowSample& sample, double error, double lse_error, double bound_share);

  const ReplayOptions& options_;
  Geometry geometry_;
  const Content& content_;
  Executor& executor_;
  double probability_rounding_;
  RowSampler sampler_;
  std::vector<RowSample> samples_;
  std::vector<std::byte> query_;   // of the sample's token
  std::vector<Partial> partials_;  // one a thread
  std::vector<double> expected_;
  std::vector<std::byte> got_;
  std::set<int64_t> checked_requests_;
  std::vector<int64_t> failed_requests_;
  std::vector<std::string> messages_;
};

}  // namespace mla::cli
