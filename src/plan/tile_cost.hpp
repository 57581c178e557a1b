#pragma once

#include <cstdint>

#include "plan/schedule.hpp"

namespace mla::plan {

/// Sums of costs are equal up to this share.
inline constexpr double kRounding = 1e-9;

/// What tiles of some rows cost; set_rows() comes first. Most tiles of a batch have as many rows as
/// the one before.
class TileCost {
 public:
  explicit TileCost(const CostModel& model) : model_(model) {}

  void set_rows(int32_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    block_ns = model_.block_ns + rows * model_.block_row_ns;
    blocks_per_ns = (1 + kRounding) / block_ns;
    part_ns = model_.tile_ns + rows * model_.partial_row_ns;
  }
  double of(int64_t blocks, bool split) const {
    return (split ? part_ns : model_.tile_ns) + static_cast<double>(blocks) * block_ns;
  }

  double block_ns = 0;  ///< one block of keys
  double blocks_per_ns = 0;
  double part_ns = 0;  ///< all but the blocks, where the result is a partial one

 private:
  CostModel model_;
  int32_t rows_ = 0;
};

}  // namespace mla::plan
