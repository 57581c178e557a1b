#include <algorithm>
#include <string>

#include "mla/error.hpp"
#include "plan/parts.hpp"
#include "plan/schedule.hpp"

namespace mla::plan {
namespace {

/// A worker but the last, or each member of a team but the last, ends with at most one cut, and a
/// row tile with c cuts has c + 1 parts.
int64_t automatic_rows(int64_t rows, int64_t cuts, int64_t tile_rows) {
  const int64_t cut_rows = cuts * std::min(tile_rows, rows);
  return cut_rows + std::min(cut_rows, rows);
}

int64_t most_keys(const Limits& limits, const Geometry& geometry) {
  return std::min<int64_t>(limits.max_listed_pages * geometry.page_size, kMaxKeys);
}

/// Forced counts: all queries in one request, with as many keys as give the most parts. Fixed
/// sizes: no more either, and the parts of one request's row tiles are kMaxSplits together.
int64_t prescribed_rows(const Limits& limits, const Geometry& geometry, const SplitPolicy& splits,
                        const CostModel& model) {
  const int64_t rows = limits.max_tokens * geometry.num_heads;
  const int64_t parts = Prescription(splits, model).most_parts(most_keys(limits, geometry));
  if (parts <= 1) return 0;
  if (splits.fixed_tokens <= 0) return parts * rows;
  const int64_t requests = std::min(limits.max_rows, limits.max_tokens);
  return std::min(parts * rows, requests * kMaxSplits * model.tile_rows);
}

}  // namespace

int64_t max_partial_rows(const Limits& limits, const Geometry& geometry, int32_t num_workers,
                         const SplitPolicy& splits, const CostModel& model) {
  if (limits.max_rows == 0) return 0;
  const int64_t rows = limits.max_tokens * geometry.num_heads;
  const int64_t needed = is_automatic(splits)
                             ? automatic_rows(rows, num_workers - 1, model.tile_rows)
                             : prescribed_rows(limits, geometry, splits, model);
  if (needed > kMaxPartialRows) {
    throw_invalid({.what = "partial rows of a plan within limits",
                   .where = "max_partial_rows",
                   .expected = "at most " + std::to_string(kMaxPartialRows),
                   .got = std::to_string(needed) + " (" + std::to_string(rows) +
                          " rows, each in several parts)"});
  }
  return needed;
}

int64_t max_tiles(const Limits& limits, const Geometry& geometry, int32_t num_workers,
                  const SplitPolicy& splits, const CostModel& model) {
  // A request of r rows has ceil(r / tile_rows) row tiles; under a lease one more request may own
  // the bucket's unused tokens.
  const int64_t requests = std::min(limits.max_rows + 1, limits.max_tokens);
  const int64_t row_tiles = limits.max_tokens * geometry.num_heads / model.tile_rows + requests;
  if (is_automatic(splits)) return std::min(kMaxTiles, row_tiles) + num_workers - 1;
  const int64_t parts =
      std::max<int64_t>(1, Prescription(splits, model).most_parts(most_keys(limits, geometry)));
  return std::min(kMaxTiles, row_tiles * parts);
}

}  // namespace mla::plan
