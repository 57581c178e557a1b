#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/schedule.hpp"

namespace mla::plan {

/// A batch as its query and key counts.
struct TestBatch {
  std::vector<int32_t> queries{};
  std::vector<int32_t> kv_len{};
  int32_t num_heads = 16;
  bool causal = true;
  int32_t num_workers = 2;
  SplitPolicy splits{};
  std::vector<int32_t> qo_indptr{};  ///< filled by input()

  ScheduleInput input() {
    qo_indptr.assign(1, 0);
    for (const int32_t count : queries) qo_indptr.push_back(qo_indptr.back() + count);
    return {.qo_indptr = qo_indptr,
            .kv_len = kv_len,
            .num_heads = num_heads,
            .causal = causal,
            .num_workers = num_workers,
            .splits = splits};
  }
};

/// Keys that one query sees.
inline int64_t visible_keys(const ScheduleInput& input, size_t request, int64_t query) {
  const int64_t queries = int64_t{input.qo_indptr[request + 1]} - input.qo_indptr[request];
  const int64_t keys = input.kv_len[request];
  return input.causal ? std::clamp<int64_t>(keys - queries + query + 1, 0, keys) : keys;
}

/// Proves that the row tiles of each request follow each other without gap or overlap, that the
/// parts of each row tile do the same over exactly the keys that its last row sees, and that
/// partial rows and merges fit them.
inline void check_schedule(const ScheduleInput& input, const CostModel& model,
                           const Schedule& schedule) {
  const auto workers = static_cast<size_t>(input.num_workers);
  ASSERT_EQ(schedule.worker_indptr.size(), workers + 1);
  ASSERT_EQ(schedule.worker_indptr.front(), 0);
  ASSERT_EQ(schedule.worker_indptr.back(), static_cast<int64_t>(schedule.tiles.size()));
  ASSERT_TRUE(std::is_sorted(schedule.worker_indptr.begin(), schedule.worker_indptr.end()));

  std::vector<Tile> tiles = schedule.tiles;
  std::sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) {
    return std::tie(a.request, a.row_begin, a.kv_begin) <
           std::tie(b.request, b.row_begin, b.kv_begin);
  });
  std::map<std::pair<int32_t, int64_t>, Merge> merges;
  int32_t rows_before = 0;
  for (const Merge& merge : schedule.merges) {
    ASSERT_EQ(merge.rows_before, rows_before);
    rows_before += merge.num_rows;
    ASSERT_TRUE(merges.emplace(std::pair(merge.request, merge.row_begin), merge).second);
  }
  std::vector<std::pair<int64_t, int64_t>> partials;  // [begin, end) of each merge
  size_t at = 0;
  int64_t merged = 0;
  int32_t max_splits = 0;
  for (size_t request = 0; request < input.kv_len.size(); ++request) {
    const int64_t queries = int64_t{input.qo_indptr[request + 1]} - input.qo_indptr[request];
    const int64_t rows = queries * input.num_heads;
    for (int64_t row = 0; row < rows;) {
      ASSERT_LT(at, tiles.size()) << "row " << row << " of request " << request << " is missing";
      const int32_t num_rows = tiles[at].num_rows;
      ASSERT_GE(num_rows, 1);
      ASSERT_LE(num_rows, model.tile_rows);
      ASSERT_LE(row + num_rows, rows);
      const int64_t visible = visible_keys(input, request, (row + num_rows - 1) / input.num_heads);
      const auto merge = merges.find({static_cast<int32_t>(request), row});
      int64_t key = 0;
      int32_t parts = 0;
      do {
        ASSERT_LT(at, tiles.size());
        const Tile& tile = tiles[at++];
        ASSERT_EQ(tile.request, static_cast<int32_t>(request));
        ASSERT_EQ(tile.row_begin, row);
        ASSERT_EQ(tile.num_rows, num_rows);
        ASSERT_EQ(tile.kv_begin, key);
        ASSERT_TRUE(tile.kv_end > tile.kv_begin || visible == 0) << "an empty part";
        if (merge == merges.end()) {
          ASSERT_EQ(tile.partial_begin, -1);
        } else {
          ASSERT_EQ(tile.partial_begin, merge->second.partial_begin + parts * num_rows);
        }
        key = tile.kv_end;
        ++parts;
      } while (key < visible);
      ASSERT_EQ(key, visible) << "row " << row << " of request " << request;
      max_splits = std::max(max_splits, parts);
      if (merge == merges.end()) {
        ASSERT_EQ(parts, 1);
      } else {
        ASSERT_GE(parts, 2);
        ASSERT_EQ(merge->second.num_partials, parts);
        ASSERT_EQ(merge->second.num_rows, num_rows);
        partials.emplace_back(merge->second.partial_begin,
                              merge->second.partial_begin + int64_t{parts} * num_rows);
        ++merged;
      }
      row += num_rows;
    }
  }
  ASSERT_EQ(at, tiles.size());
  ASSERT_EQ(merged, static_cast<int64_t>(schedule.merges.size()));
  ASSERT_EQ(max_splits, schedule.max_splits);
  std::sort(partials.begin(), partials.end());
  int64_t next = 0;
  for (const auto& [begin, end] : partials) {
    ASSERT_EQ(begin, next) << "partial rows overlap or leave a gap";
    next = end;
  }
  ASSERT_EQ(next, schedule.num_partial_rows);
}

/// Cost of one tile, written down apart from the planner's own.
inline double cost_of(const Tile& tile, const CostModel& model) {
  const double tokens = tile.kv_end - tile.kv_begin;
  const double blocks = std::ceil(tokens / model.block_tokens);
  const double partial = tile.partial_begin >= 0 ? tile.num_rows * model.partial_row_ns : 0;
  return model.tile_ns + blocks * (model.block_ns + tile.num_rows * model.block_row_ns) + partial;
}

/// The schedule's row tiles as they are before a cut or, where they are prescribed, its parts.
inline std::vector<Tile> uncut_tiles(const Schedule& schedule, bool automatic) {
  if (!automatic) return schedule.tiles;
  std::map<std::pair<int32_t, int64_t>, Tile> row_tiles;
  for (const Tile& tile : schedule.tiles) {
    Tile& whole = row_tiles.try_emplace({tile.request, tile.row_begin}, tile).first->second;
    whole.kv_begin = 0;
    whole.kv_end = std::max(whole.kv_end, tile.kv_end);
    whole.partial_begin = -1;
  }
  std::vector<Tile> tiles;
  for (const auto& [key, tile] : row_tiles) tiles.push_back(tile);
  return tiles;
}

/// The bound on the heaviest worker that docs/planner.md proves.
inline double load_bound(const std::vector<Tile>& tiles, double workers, bool automatic,
                         const CostModel& model) {
  double total = 0;
  double largest = 0;
  double most_rows = 0;
  double most_blocks = 0;
  for (const Tile& tile : tiles) {
    const double ns = cost_of(tile, model);
    total += ns;
    largest = std::max(largest, ns);
    most_rows = std::max<double>(most_rows, tile.num_rows);
    most_blocks =
        std::max(most_blocks, std::ceil(static_cast<double>(tile.kv_end) / model.block_tokens));
  }
  const double others = 1 - 1 / workers;
  const double whole = total / workers + others * largest;
  if (!automatic) return whole;
  const double part = model.tile_ns + most_rows * model.partial_row_ns;
  const double block = model.block_ns + most_rows * model.block_row_ns;
  double least = std::ceil(std::sqrt(most_blocks * model.partial_row_ns / block)) + 1;
  if (workers > kMaxSplits) least = std::max(least, std::ceil(most_blocks / (kMaxSplits - 2)));
  const double cut = std::max(total / workers + others * (2 * part + block), part + least * block);
  const double merge = model.merge_ns + (std::ceil(largest / cut) + 1) * model.partial_row_ns;
  return std::min(whole, cut + merge);
}

/// All that a kernel sees of a tile.
inline auto fields_of(const Tile& tile) {
  return std::tuple(tile.row_begin, tile.partial_begin, tile.request, tile.num_rows, tile.kv_begin,
                    tile.kv_end);
}

inline void expect_same(const Schedule& a, const Schedule& b) {
  ASSERT_EQ(a.worker_indptr, b.worker_indptr);
  ASSERT_EQ(a.tiles.size(), b.tiles.size());
  for (size_t i = 0; i < a.tiles.size(); ++i) {
    ASSERT_EQ(fields_of(a.tiles[i]), fields_of(b.tiles[i])) << "tile " << i;
  }
  ASSERT_EQ(a.merges.size(), b.merges.size());
  ASSERT_EQ(a.num_partial_rows, b.num_partial_rows);
  ASSERT_EQ(a.max_splits, b.max_splits);
}

inline double heaviest_worker(const Schedule& schedule, const CostModel& model) {
  double heaviest = 0;
  for (size_t worker = 0; worker + 1 < schedule.worker_indptr.size(); ++worker) {
    double load = 0;
    for (int32_t i = schedule.worker_indptr[worker]; i < schedule.worker_indptr[worker + 1]; ++i) {
      load += cost_of(schedule.tiles[static_cast<size_t>(i)], model);
    }
    heaviest = std::max(heaviest, load);
  }
  return heaviest;
}

/// When all is merged, as the planner models it: the parts of a row are merged one after another.
inline double finish_ns(const Schedule& schedule, const CostModel& model) {
  const double merge_ns =
      schedule.merges.empty() ? 0 : model.merge_ns + schedule.max_splits * model.partial_row_ns;
  return heaviest_worker(schedule, model) + merge_ns;
}

}  // namespace mla::plan
