#include "plan/row_tiles.hpp"

#include <algorithm>
#include <string>

#include "mla/error.hpp"

namespace mla::plan {

std::span<Tile> list_row_tiles(const ScheduleInput& input, const CostModel& model,
                               std::vector<Tile>& memory) {
  const int64_t heads = input.num_heads;
  const int64_t tile_rows = model.tile_rows;
  const auto num_requests = static_cast<int32_t>(input.kv_len.size());
  const int64_t all_rows = num_requests == 0 ? 0 : input.qo_indptr[num_requests] * heads;
  // Each request may end in a tile that is not full.
  const int64_t most_tiles = std::min(all_rows, all_rows / tile_rows + num_requests);
  if (most_tiles > kMaxTiles) {
    throw_invalid({.what = "tiles of the plan",
                   .where = "make_schedule",
                   .expected = "at most " + std::to_string(kMaxTiles),
                   .got = std::to_string(most_tiles) + " for " + std::to_string(all_rows) +
                          " rows (query tokens x heads) of " + std::to_string(num_requests) +
                          " requests in tiles of " + std::to_string(tile_rows)});
  }
  if (memory.size() < static_cast<size_t>(most_tiles)) {
    memory.resize(static_cast<size_t>(most_tiles));
  }
  Tile* next = memory.data();
  for (int32_t i = 0; i < num_requests; ++i) {
    const int32_t queries = input.qo_indptr[i + 1] - input.qo_indptr[i];
    const int32_t keys = input.kv_len[i];
    const int64_t rows = queries * heads;
    int64_t row = 0;
    for (; rows - row > tile_rows; row += tile_rows) {
      const int64_t last_query = (row + tile_rows - 1) / heads;
      const int64_t seen =
          input.causal ? std::max<int64_t>(0, last_query + 1 - queries + keys) : keys;
      *next++ = {.row_begin = row,
                 .request = i,
                 .num_rows = model.tile_rows,
                 .kv_end = static_cast<int32_t>(seen)};
    }
    // The last tile has the request's last query, which sees all keys.
    if (rows > 0) {
      *next++ = {.row_begin = row,
                 .request = i,
                 .num_rows = static_cast<int32_t>(rows - row),
                 .kv_end = keys};
    }
  }
  return {memory.data(), next};
}

}  // namespace mla::plan
