#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/row_tiles.hpp"
#include "plan/schedule.hpp"

namespace mla::plan {

inline bool is_automatic(const SplitPolicy& splits) {
  return splits.fixed_tokens <= 0 && splits.forced_count <= 0;
}

/// The parts of one row tile's keys: the first `longer` of them have steps + 1 steps, the others
/// `steps`, the last what is left. None is empty, but for the only one of a tile without keys.
struct Parts {
  int64_t count = 1;
  int64_t steps = 0;
  int64_t longer = 0;
  int64_t step_tokens = 1;
  int64_t keys = 0;

  /// Calls fn(count, tokens of each) for runs of parts of one size, in the order of the keys.
  template <class Fn>
  void for_each_run(const Fn& fn) const {
    const int64_t last = count - 1;
    if (longer > 0) fn(longer, (steps + 1) * step_tokens);
    if (last > longer) fn(last - longer, steps * step_tokens);
    fn(1, keys - (last * steps + longer) * step_tokens);
  }
};

/// What fixed splits know of the request that a row tile belongs to.
struct RequestSize {
  int64_t keys = 0;
  int64_t row_tiles = 0;
};

inline RequestSize size_of_request(const ScheduleInput& input, const CostModel& model,
                                   int32_t request) {
  const int64_t queries = int64_t{input.qo_indptr[request + 1]} - input.qo_indptr[request];
  return {.keys = input.kv_len[request],
          .row_tiles = ceil_div(queries * input.num_heads, model.tile_rows)};
}

/// The parts that a fixed size or a forced count prescribes.
class Prescription {
 public:
  Prescription(const SplitPolicy& splits, const CostModel& model)
      : fixed_(splits.fixed_tokens > 0),
        most_parts_(fixed_ ? kMaxSplits : std::min(splits.forced_count, kMaxSplits)),
        step_tokens_(std::min<int64_t>(
            int64_t{1} << 31,  // no request has more
            ceil_div(std::max(splits.fixed_tokens, 1), model.split_align) * model.split_align)),
        steps_of_(step_tokens_) {}

  /// Of a row tile that sees `keys` of its request's keys.
  Parts parts(int64_t keys, const RequestSize& request) const {
    Parts parts{.step_tokens = step_tokens_, .keys = keys};
    const int64_t steps = steps_of_(keys);
    if (fixed_) {
      // From the request alone, so that its row tiles are cut at the same places. A prompt has work
      // for every worker without being cut: its row tiles share the most parts of one.
      const int64_t most =
          std::max<int64_t>(1, most_parts_ / std::max<int64_t>(1, request.row_tiles));
      const int64_t request_steps = steps_of_(request.keys);
      parts.steps = request_steps <= most ? 1 : ceil_div(request_steps, most);
      parts.count = parts.steps == 1 ? steps : ceil_div(steps, parts.steps);
      parts.count = std::max<int64_t>(parts.count, 1);
    } else {
      parts.count = std::clamp<int64_t>(steps, 1, most_parts_);
      parts.steps = steps / parts.count;
      parts.longer = steps % parts.count;
    }
    return parts;
  }

  /// The most parts that a row tile of up to so many keys has.
  int64_t most_parts(int64_t keys) const { return std::min(most_parts_, steps_of_(keys)); }

 private:
  bool fixed_;
  int64_t most_parts_;
  int64_t step_tokens_;
  CeilDivider steps_of_;
};

}  // namespace mla::plan
