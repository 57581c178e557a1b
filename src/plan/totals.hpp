#pragma once

#include <cstdint>
#include <span>

#include "plan/schedule.hpp"

namespace mla::plan {

/// The whole batch before it is shared out.
struct Totals {
  int64_t tiles = 0;         ///< row tiles or, where parts are prescribed, parts
  int64_t partial_rows = 0;  ///< of prescribed parts
  double ns = 0;
  double largest_ns = 0;  ///< one tile
  // Automatic splits only:
  int32_t most_rows = 0;
  int64_t most_blocks = 0;
};

Totals sum_up(std::span<const Tile> row_tiles, const ScheduleInput& input, const CostModel& model);

}  // namespace mla::plan
