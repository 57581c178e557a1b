#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "plan/schedule.hpp"
#include "plan/schedule_checks.hpp"

namespace mla::plan {
namespace {

/// Draws batches, models and policies; the same seed gives the same ones.
class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}

  int32_t between(int32_t low, int32_t high) {
    return static_cast<int32_t>(
        low + static_cast<int64_t>(random_() % static_cast<uint64_t>(int64_t{high} - low + 1)));
  }
  bool once_in(int32_t times) { return between(1, times) == 1; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int32_t>(values.size()) - 1)];
  }
  /// 0 often, small mostly, `most` at times; about as many of each size.
  int32_t length(int32_t most) {
    if (once_in(8)) return 0;
    if (once_in(16)) return most;
    const int32_t bits = between(0, static_cast<int32_t>(std::log2(most)));
    return std::min(most, between(1, 1 << bits));
  }

  CostModel model() {
    CostModel model;
    model.tile_rows = one_of({1, 2, 16, 48, 64, 128, 256});
    model.block_tokens = one_of({1, 16, 64, 100, 128});
    model.split_align = one_of({1, 1, 16, 64});
    model.tile_ns = one_of({0.0, 500.0, 3000.0});
    model.block_ns = one_of({1.0, 700.0, 20000.0});
    model.block_row_ns = one_of({0.0, 5.0, 800.0});
    model.partial_row_ns = one_of({0.0, 25.0, 300.0});
    model.merge_ns = one_of({0.0, 3000.0});
    return model;
  }

  SplitPolicy splits() {
    if (once_in(3)) return {.fixed_tokens = one_of({1, 7, 64, 1000, 4096, INT32_MAX})};
    if (once_in(3)) return {.forced_count = one_of({1, 2, 3, 32, 256})};
    return {};
  }

  TestBatch batch(const CostModel& model) {
    TestBatch batch;
    batch.num_heads = one_of({1, 3, 8, 16, 67, 128, 1024});
    batch.causal = once_in(2);
    batch.num_workers = once_in(4) ? one_of({1, 2, 132, 264, 1024}) : between(1, 264);
    batch.splits = splits();
    // Tiles that keep a test short: a prescribed part is a tile.
    int64_t tiles_left = batch.splits.fixed_tokens + batch.splits.forced_count > 0 ? 300 : 20000;
    const int32_t num_rows = length(200);
    const int32_t most_queries = one_of({1, 1, 4, 70});
    const int32_t most_keys = one_of({64, 5000, 200000});
    for (int32_t i = 0; i < num_rows; ++i) {
      batch.queries.push_back(most_queries == 1 ? 1 : length(most_queries));
      batch.kv_len.push_back(length(most_keys));
      tiles_left -= 1 + int64_t{batch.queries.back()} * batch.num_heads / model.tile_rows;
      if (tiles_left < 0) {
        batch.queries.back() = 1;
        break;
      }
    }
    return batch;
  }

 private:
  std::mt19937_64 random_;
};

/// Cost of one tile, written down apart from the planner's own.
double cost_of(const Tile& tile, const CostModel& model) {
  const double tokens = tile.kv_end - tile.kv_begin;
  const double blocks = std::ceil(tokens / model.block_tokens);
  const double partial = tile.partial_begin >= 0 ? tile.num_rows * model.partial_row_ns : 0;
  return model.tile_ns + blocks * (model.block_ns + tile.num_rows * model.block_row_ns) + partial;
}

double heaviest_worker(const Schedule& schedule, const CostModel& model) {
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

/// The bound that docs/planner.md proves, from the schedule's uncut tiles.
double load_bound(const ScheduleInput& input, const CostModel& model, const Schedule& schedule) {
  const bool automatic = input.splits.fixed_tokens == 0 && input.splits.forced_count == 0;
  double total = 0;
  double largest = 0;
  double most_rows = 0;
  double most_blocks = 0;
  // The row tiles as they are before a cut: an automatic part is no row tile of its own.
  const std::vector<Tile>& tiles = schedule.tiles;
  for (size_t i = 0; i < tiles.size(); ++i) {
    Tile tile = tiles[i];
    if (automatic) {
      while (i + 1 < tiles.size() && tiles[i + 1].request == tile.request &&
             tiles[i + 1].row_begin == tile.row_begin) {
        ++i;
      }
      tile.kv_end = tiles[i].kv_end;
      tile.partial_begin = -1;
    }
    const double ns = cost_of(tile, model);
    total += ns;
    largest = std::max(largest, ns);
    most_rows = std::max<double>(most_rows, tile.num_rows);
    most_blocks =
        std::max(most_blocks, std::ceil(static_cast<double>(tile.kv_end) / model.block_tokens));
  }
  const double workers = input.num_workers;
  const double others = 1 - 1 / workers;
  const double whole = total / workers + others * largest;
  if (!automatic) return whole;
  const double part = model.tile_ns + most_rows * model.partial_row_ns;
  const double block = model.block_ns + most_rows * model.block_row_ns;
  const double chain = std::sqrt(model.partial_row_ns * largest);
  const double parts_limit =
      input.num_workers > kMaxSplits ? part + std::ceil(most_blocks / (kMaxSplits - 2)) * block : 0;
  const double cut = std::max({total / workers + others * (2 * part + block), chain, parts_limit});
  const double merge = model.merge_ns + std::ceil(largest / cut) * model.partial_row_ns;
  return std::min(whole, cut + merge);
}

void check_everything(TestBatch& batch, const CostModel& model) {
  const ScheduleInput input = batch.input();
  Schedule schedule;
  make_schedule(input, model, schedule);
  ASSERT_NO_FATAL_FAILURE(check_schedule(input, model, schedule));
  ASSERT_LE(schedule.max_splits, kMaxSplits);
  EXPECT_LE(heaviest_worker(schedule, model), load_bound(input, model, schedule) * (1 + 1e-6));
}

std::string describe(const TestBatch& batch, const CostModel& model, uint64_t seed) {
  std::string text = "seed " + std::to_string(seed) + " H" + std::to_string(batch.num_heads) +
                     " workers " + std::to_string(batch.num_workers) + " fixed " +
                     std::to_string(batch.splits.fixed_tokens) + " forced " +
                     std::to_string(batch.splits.forced_count) + " tile_rows " +
                     std::to_string(model.tile_rows) + " block " +
                     std::to_string(model.block_tokens) + (batch.causal ? " causal" : "");
  for (size_t i = 0; i < std::min<size_t>(batch.kv_len.size(), 8); ++i) {
    text += " q" + std::to_string(batch.queries[i]) + "/kv" + std::to_string(batch.kv_len[i]);
  }
  return text;
}

TEST(ScheduleProperty, TilesCoverEveryVisiblePairOnceAndLoadStaysUnderTheBound) {
  for (uint64_t seed = 1; seed <= 4000; ++seed) {
    Draw draw(seed);
    const CostModel model = draw.model();
    TestBatch batch = draw.batch(model);
    SCOPED_TRACE(describe(batch, model, seed));
    ASSERT_NO_FATAL_FAILURE(check_everything(batch, model));
  }
}

}  // namespace
}  // namespace mla::plan
