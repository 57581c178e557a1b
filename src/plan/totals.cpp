#include "plan/totals.hpp"

#include <algorithm>

#include "plan/parts.hpp"
#include "plan/row_tiles.hpp"
#include "plan/tile_cost.hpp"

namespace mla::plan {
namespace {

Totals sum_automatic(std::span<const Tile> row_tiles, const CostModel& model) {
  const CeilDivider blocks_of(model.block_tokens);
  TileCost cost(model);
  Totals totals{.tiles = static_cast<int64_t>(row_tiles.size())};
  for (const Tile& tile : row_tiles) {
    cost.set_rows(tile.num_rows);
    const int64_t blocks = blocks_of(tile.kv_end);
    const double ns = cost.of(blocks, false);
    totals.ns += ns;
    totals.largest_ns = std::max(totals.largest_ns, ns);
    totals.most_rows = std::max(totals.most_rows, tile.num_rows);
    totals.most_blocks = std::max(totals.most_blocks, blocks);
  }
  return totals;
}

Totals sum_prescribed(std::span<const Tile> row_tiles, const ScheduleInput& input,
                      const CostModel& model) {
  const CeilDivider blocks_of(model.block_tokens);
  const Prescription prescription(input.splits, model);
  TileCost cost(model);
  Totals totals;
  for (const Tile& tile : row_tiles) {
    cost.set_rows(tile.num_rows);
    const Parts parts =
        prescription.parts(tile.kv_end, size_of_request(input, model, tile.request));
    const bool split = parts.count > 1;
    totals.tiles += parts.count;
    if (split) totals.partial_rows += parts.count * tile.num_rows;
    parts.for_each_run([&](int64_t count, int64_t tokens) {
      const double ns = cost.of(blocks_of(tokens), split);
      totals.ns += static_cast<double>(count) * ns;
      totals.largest_ns = std::max(totals.largest_ns, ns);
    });
  }
  return totals;
}

}  // namespace

Totals sum_up(std::span<const Tile> row_tiles, const ScheduleInput& input, const CostModel& model) {
  return is_automatic(input.splits) ? sum_automatic(row_tiles, model)
                                    : sum_prescribed(row_tiles, input, model);
}

}  // namespace mla::plan
