#include <algorithm>

#include "plan/schedule.hpp"

namespace mla::plan {

int64_t max_tiles(const Limits& limits, const Geometry& geometry, int32_t num_workers,
                  const SplitPolicy& splits, const CostModel& model) {
  // A request of r rows has ceil(r / tile_rows) row tiles; under a lease one more request may own
  // the bucket's unused tokens.
  const int64_t requests = std::min(limits.max_rows + 1, limits.max_tokens);
  const int64_t row_tiles = limits.max_tokens * geometry.num_heads / model.tile_rows + requests;
  const bool prescribed = splits.fixed_tokens > 0 || splits.forced_count > 0;
  const int64_t parts =
      splits.fixed_tokens > 0 ? kMaxSplits : std::max<int64_t>(1, splits.forced_count);
  return std::min(kMaxTiles, prescribed ? row_tiles * parts : row_tiles + num_workers);
}

}  // namespace mla::plan
