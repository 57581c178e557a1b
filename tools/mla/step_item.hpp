#pragma once

#include <cstdint>

#include "mla/workload.hpp"

namespace mla::cli {

/// One request's part of a step: its tokens begin .. begin + span - 1 are computed. The last
/// num_drafts of them are guesses that a decode step verifies; after the step those that turned out
/// wrong are trimmed.
struct StepItem {
  int64_t request = 0;  ///< index into the workload
  int64_t begin = 0;
  int32_t span = 0;
  int32_t num_drafts = 0;
  int32_t num_accepted = 0;  ///< of the drafts, the first ones

  int32_t num_rejected() const { return num_drafts - num_accepted; }
  /// Tokens of the request that are stored once the rejected ones are trimmed.
  int64_t kept_end() const { return begin + span - num_rejected(); }

  bool operator==(const StepItem&) const = default;
};

/// Speculative decoding without a model: who is right is drawn.
struct Speculation {
  int32_t num_drafts = 0;  ///< of a decode step; 0: does not speculate
  uint64_t seed = 0;

  /// How many of `drafted` drafts of a decode step that starts at `begin` are right. Each is in
  /// seven of ten cases, and none is after a wrong one. A function of the arguments alone: what
  /// else the step does has no part in it.
  int32_t draw_accepted(const Request& request, int64_t begin, int32_t drafted) const;
};

/// Key of the content that `item` computes or finds at `position`. A rejected draft is not what the
/// request holds there afterwards: it has a key of its own, another one for every step.
uint64_t content_key(const Request& request, const StepItem& item, int64_t position);

}  // namespace mla::cli
