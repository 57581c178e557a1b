#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/schedule.hpp"

namespace mla::plan {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Division by one number, 1 to 2^31, without the division: a hardware one costs as much as
/// the rest of a tile's work.
class CeilDivider {
 public:
  explicit CeilDivider(int64_t divisor)
      : shift_(31 + static_cast<int32_t>(std::bit_width(static_cast<uint64_t>(divisor - 1)))),
        factor_(static_cast<uint64_t>(ceil_div(int64_t{1} << shift_, divisor))) {}

  /// ceil(value / divisor) for 0 <= value <= 2^31 - 1. The factor is above 2^shift / divisor by
  /// less than one part in 2^31, which the floor hides.
  int64_t operator()(int64_t value) const {
    if (value == 0) return 0;
    return static_cast<int64_t>((static_cast<uint64_t>(value - 1) * factor_) >> shift_) + 1;
  }

 private:
  int32_t shift_;
  uint64_t factor_;
};

/// Lists the batch's rows in tiles of at most tile_rows, in order, each with all keys that its last
/// row sees. Where a tile begins depends on its request, the heads and tile_rows alone.
/// The list lies at the beginning of `memory`, which grows where it must.
/// Throws InvalidArgument: rows / tile_rows + requests is above kMaxTiles.
std::span<Tile> list_row_tiles(const ScheduleInput& input, const CostModel& model,
                               std::vector<Tile>& memory);

}  // namespace mla::plan
