#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "mla/content.hpp"
#include "mla/geometry.hpp"
#include "mla/reference.hpp"
#include "mla/replay_options.hpp"
#include "mla/replay_stats.hpp"
#include "mla/row_sampler.hpp"
#include "mla/step_item.hpp"

namespace mla::cli {

/// Checks sampled output rows of a replay against the reference in double. The keys are not read
/// from the pool but drawn again from the generator, so that a row in the wrong slot, a page shared
/// by mistake or a lost copy shows as well as a wrong sum.
class RowChecker {
 public:
  RowChecker(const ReplayOptions& options, const Geometry& geometry, const Content& content);

  /// Chooses the rows of a step that are checked.
  void choose(const std::vector<StepItem>& items);

  /// Checks those of `layer`; none after an interrupt. out [T, H, rank] and lse [T, H] of the step,
  /// packed in the order of its items.
  void check(const std::vector<Request>& requests, int32_t layer, const ConstTensor<3>& out,
             const TensorView<const float, 2>& lse, ReplayStats& stats);

  /// Requests with a row outside of its bound, each once; and the first few rows in words.
  const std::vector<int64_t>& failed_requests() const { return failed_requests_; }
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  /// Draws the sample's keys and its query again.
  void redraw(const Request& request, const RowSample& sample);
  void compare(const RowSample& sample, const ReferenceRow& expected, const ConstTensor<3>& out,
               const TensorView<const float, 2>& lse, ReplayStats& stats);
  void note_failure(const RowSample& sample, double error, double lse_error, double bound_share);

  const ReplayOptions& options_;
  Geometry geometry_;
  const Content& content_;
  RowSampler sampler_;
  std::vector<RowSample> samples_;
  std::vector<std::byte> keys_;
  std::vector<std::byte> query_;
  std::vector<double> expected_;
  std::vector<int64_t> failed_requests_;
  std::vector<std::string> messages_;
};

}  // namespace mla::cli
