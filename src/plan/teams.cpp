#include "plan/teams.hpp"

#include <algorithm>
#include <limits>

#include "plan/parts.hpp"
#include "plan/row_tiles.hpp"

namespace mla::plan {

int32_t team_size(const ScheduleInput& input, const CostModel& model) {
  if (!model.shares_keys || !is_automatic(input.splits)) return 1;
  int32_t fewest = std::numeric_limits<int32_t>::max();
  for (size_t i = 0; i < input.kv_len.size(); ++i) {
    const int32_t queries = input.qo_indptr[i + 1] - input.qo_indptr[i];
    if (queries == 0 || input.kv_len[i] == 0) continue;
    fewest = std::min(fewest, queries);
    if (int64_t{fewest} * input.num_heads <= model.tile_rows) return 1;
  }
  const int64_t size = ceil_div(int64_t{fewest} * input.num_heads, model.tile_rows);
  return size <= input.num_workers ? static_cast<int32_t>(size) : 1;
}

std::span<const Tile> list_team_tiles(std::span<const Tile> row_tiles, int32_t size,
                                      std::vector<Tile>& memory) {
  if (memory.size() < row_tiles.size()) memory.resize(row_tiles.size());
  Tile* next = memory.data();
  for (size_t i = 0; i < row_tiles.size();) {
    // The first row tile has the most rows, the last sees the most keys.
    Tile tile = row_tiles[i];
    tile.row_begin = static_cast<int64_t>(i);
    const size_t end = std::min(i + static_cast<size_t>(size), row_tiles.size());
    for (; i < end && row_tiles[i].request == tile.request; ++i) tile.kv_end = row_tiles[i].kv_end;
    *next++ = tile;
  }
  return {memory.data(), next};
}

}  // namespace mla::plan
