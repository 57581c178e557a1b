#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "mla/step_item.hpp"

namespace mla::cli {

/// One output row of a step.
struct RowSample {
  StepItem item;         ///< whose row it is
  int64_t position = 0;  ///< of its token in the request
  int64_t token = 0;     ///< in the packed step
  int32_t layer = 0;
  int32_t head = 0;

  bool operator==(const RowSample&) const = default;
};

/// Chooses output rows of steps, seeded.
class RowSampler {
 public:
  RowSampler(uint64_t seed, int32_t num_layers, int32_t num_heads)
      : seed_(seed), num_layers_(num_layers), num_heads_(num_heads) {}

  /// `count` different rows of the step, or all where it has fewer. Requests have a part in them
  /// alike, whatever their share of the step, so that decode rows are seen beside long prefill
  /// chunks; where there are more requests than rows, those that had none in any step come first.
  /// Of one request every set of rows is as likely as another.
  std::vector<RowSample> choose(const std::vector<StepItem>& items, int64_t count);

 private:
  /// Rows that the item has: its tokens in every layer and head.
  int64_t num_rows(const StepItem& item) const;
  /// How many rows each item gives: one more of each in turn, those of new requests first and else
  /// from a random one on, until there are `count` or no row is left.
  std::vector<int64_t> share_out(const std::vector<StepItem>& items, int64_t count);
  /// `count` different numbers below `below`.
  std::set<int64_t> draw_set(int64_t count, int64_t below);
  int64_t draw(int64_t below);

  uint64_t seed_;
  int32_t num_layers_;
  int32_t num_heads_;
  uint64_t num_drawn_ = 0;
  std::set<int64_t> seen_;  // requests that gave a row
};

}  // namespace mla::cli
