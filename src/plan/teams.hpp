#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/schedule.hpp"

// Teams of neighbouring workers, which read the same keys at the same time: a row tile of a request
// for each member. The scheme is in docs/planner.md.

namespace mla::plan {

/// Members of each team: the fewest row tiles of a request that has keys. 1: no teams.
int32_t team_size(const ScheduleInput& input, const CostModel& model);

/// What a team does at a time: up to `size` row tiles of one request, as one tile that costs no
/// less than any of them. Its row_begin is the index of the first of them. The list lies in
/// `memory`.
std::span<const Tile> list_team_tiles(std::span<const Tile> row_tiles, int32_t size,
                                      std::vector<Tile>& memory);

/// Whether a row tile has a part there. The first is never left out: it may be all there is.
inline bool sees(const Tile& row_tile, const Tile& part) {
  return part.kv_begin == 0 || part.kv_begin < row_tile.kv_end;
}

/// How many parts a row tile has of those of its team's tile, which follow the first.
inline int32_t count_parts(const Tile& row_tile, std::span<const Tile> parts) {
  int32_t count = 1;
  for (const Tile& part : parts.subspan(1)) {
    if (part.kv_begin == 0 || !sees(row_tile, part)) break;
    ++count;
  }
  return count;
}

/// Shares the tiles and parts that were dealt to teams out among their members.
/// row_tiles  what the teams' tiles stand for; partial_begin is written
template <class Sink>
void share_out(const Schedule& teams, int32_t size, std::span<Tile> row_tiles, Sink& sink) {
  const std::span<const Tile> parts = teams.tiles;
  for (size_t team = 0; team + 1 < teams.worker_indptr.size(); ++team) {
    const auto begin = static_cast<size_t>(teams.worker_indptr[team]);
    const auto end = static_cast<size_t>(teams.worker_indptr[team + 1]);
    for (int32_t member = 0; member < size; ++member) {
      for (size_t i = begin; i < end; ++i) {
        const Tile& part = parts[i];
        const auto at = static_cast<size_t>(part.row_begin + member);
        if (at >= row_tiles.size() || row_tiles[at].request != part.request) continue;
        Tile& row_tile = row_tiles[at];
        if (!sees(row_tile, part)) continue;
        if (part.kv_begin == 0 && part.partial_begin >= 0) {
          const int32_t count = count_parts(row_tile, parts.subspan(i));
          if (count > 1) row_tile.partial_begin = sink.reserve(row_tile, count);
        }
        Tile tile = row_tile;
        tile.kv_begin = part.kv_begin;
        tile.kv_end = std::min(part.kv_end, row_tile.kv_end);
        sink.put(tile);
        // Where its next part begins.
        if (row_tile.partial_begin >= 0) row_tile.partial_begin += row_tile.num_rows;
      }
      sink.next_worker();
    }
  }
}

}  // namespace mla::plan
