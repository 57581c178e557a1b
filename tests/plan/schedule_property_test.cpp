#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <tuple>
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
    model.shares_keys = once_in(2);
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
    const bool equal = once_in(2);  // in queries: teams need requests of as many row tiles
    const int32_t queries = between(1, most_queries);
    const int32_t most_keys = one_of({64, 5000, 200000});
    for (int32_t i = 0; i < num_rows; ++i) {
      batch.queries.push_back(equal || most_queries == 1 ? queries : length(most_queries));
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

void check_everything(TestBatch& batch, const CostModel& model) {
  const ScheduleInput input = batch.input();
  Schedule schedule;
  make_schedule(input, model, schedule);
  ASSERT_NO_FATAL_FAILURE(check_schedule(input, model, schedule));
  ASSERT_LE(schedule.max_splits, kMaxSplits);
  const bool automatic = input.splits.fixed_tokens == 0 && input.splits.forced_count == 0;
  double bound = load_bound(uncut_tiles(schedule, automatic), input.num_workers, automatic, model);
  if (model.shares_keys) bound *= 17.0 / 16;  // what teams may lose
  EXPECT_LE(heaviest_worker(schedule, model), bound * (1 + 1e-6));
}

std::string describe(const TestBatch& batch, const CostModel& model, uint64_t seed) {
  std::string text =
      "seed " + std::to_string(seed) + " H" + std::to_string(batch.num_heads) + " workers " +
      std::to_string(batch.num_workers) + " fixed " + std::to_string(batch.splits.fixed_tokens) +
      " forced " + std::to_string(batch.splits.forced_count) + " tile_rows " +
      std::to_string(model.tile_rows) + " block " + std::to_string(model.block_tokens) +
      (batch.causal ? " causal" : "") + (model.shares_keys ? " shares keys" : "");
  for (size_t i = 0; i < std::min<size_t>(batch.kv_len.size(), 8); ++i) {
    text += " q" + std::to_string(batch.queries[i]) + "/kv" + std::to_string(batch.kv_len[i]);
  }
  return text;
}

constexpr uint64_t kSeeds = 4000;

TEST(ScheduleProperty, TilesCoverEveryVisiblePairOnceAndLoadStaysUnderTheBound) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Draw draw(seed);
    const CostModel model = draw.model();
    TestBatch batch = draw.batch(model);
    SCOPED_TRACE(describe(batch, model, seed));
    ASSERT_NO_FATAL_FAILURE(check_everything(batch, model));
  }
}

// The same claim without any of the reasoning in check_schedule: each pair is counted.
TEST(ScheduleProperty, SmallBatchesCountEveryPairOnce) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    Draw draw(seed);
    CostModel model = draw.model();
    model.block_tokens = draw.one_of({1, 3, 8});
    TestBatch batch;
    batch.num_heads = draw.between(1, 5);
    batch.causal = draw.once_in(2);
    batch.num_workers = draw.between(1, 12);
    batch.splits = draw.splits();
    for (int32_t i = draw.between(0, 5); i > 0; --i) {
      batch.queries.push_back(draw.between(0, 9));
      batch.kv_len.push_back(draw.between(0, 30));
    }
    SCOPED_TRACE(describe(batch, model, seed));
    const ScheduleInput input = batch.input();
    Schedule schedule;
    make_schedule(input, model, schedule);
    for (size_t request = 0; request < batch.kv_len.size(); ++request) {
      const int64_t rows = int64_t{batch.queries[request]} * batch.num_heads;
      for (int64_t row = 0; row < rows; ++row) {
        std::vector<int32_t> times(static_cast<size_t>(batch.kv_len[request]), 0);
        int32_t written = 0;
        for (const Tile& tile : schedule.tiles) {
          if (tile.request != static_cast<int32_t>(request) || row < tile.row_begin ||
              row >= tile.row_begin + tile.num_rows) {
            continue;
          }
          ++written;
          for (int32_t key = tile.kv_begin; key < tile.kv_end; ++key) {
            times[static_cast<size_t>(key)] += 1;
          }
        }
        ASSERT_GE(written, 1) << "row " << row << " of request " << request;
        const int64_t visible = visible_keys(input, request, row / batch.num_heads);
        for (int64_t key = 0; key < visible; ++key) {
          ASSERT_EQ(times[static_cast<size_t>(key)], 1)
              << "key " << key << ", row " << row << ", request " << request;
        }
      }
    }
  }
}

TEST(ScheduleProperty, SameInputGivesTheSameSchedule) {
  Schedule reused;
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    Draw draw(seed);
    const CostModel model = draw.model();
    TestBatch batch = draw.batch(model);
    Schedule fresh;
    make_schedule(batch.input(), model, fresh);
    make_schedule(batch.input(), model, reused);  // holds the last batch's
    SCOPED_TRACE(describe(batch, model, seed));
    ASSERT_NO_FATAL_FAILURE(expect_same(fresh, reused));
  }
}

// What a request's bits follow from: its rows, key ranges and the order of its parts.
std::vector<std::tuple<int64_t, int32_t, int32_t, int32_t>> parts_of(const Schedule& schedule,
                                                                     int32_t request) {
  std::vector<std::tuple<int64_t, int32_t, int32_t, int32_t>> parts;
  for (const Tile& tile : schedule.tiles) {
    if (tile.request != request) continue;
    parts.emplace_back(tile.row_begin, tile.num_rows, tile.kv_begin, tile.kv_end);
  }
  std::sort(parts.begin(), parts.end());
  return parts;
}

TEST(ScheduleProperty, FixedPartsOfARequestDoNotDependOnItsBatchOrTheWorkers) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Draw draw(seed);
    const CostModel model = draw.model();
    TestBatch batch = draw.batch(model);
    batch.splits = {.fixed_tokens = draw.one_of({1, 64, 1000, 4096})};
    if (batch.kv_len.size() > 20) {
      batch.queries.resize(20);
      batch.kv_len.resize(20);
    }
    Schedule together;
    make_schedule(batch.input(), model, together);
    for (size_t i = 0; i < batch.kv_len.size(); ++i) {
      TestBatch alone{.queries = {batch.queries[i]},
                      .kv_len = {batch.kv_len[i]},
                      .num_heads = batch.num_heads,
                      .causal = batch.causal,
                      .num_workers = draw.between(1, 264),
                      .splits = batch.splits};
      Schedule schedule;
      make_schedule(alone.input(), model, schedule);
      ASSERT_EQ(parts_of(schedule, 0), parts_of(together, static_cast<int32_t>(i)))
          << describe(batch, model, seed);
    }
  }
}

TEST(ScheduleProperty, NoBatchWithinTheLimitsNeedsMoreThanTheyAllow) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Draw draw(seed);
    const CostModel model = draw.model();
    TestBatch batch = draw.batch(model);
    const Geometry geometry{.num_heads = batch.num_heads, .page_size = draw.one_of({1, 16, 64})};
    Limits limits{.max_rows = static_cast<int64_t>(batch.kv_len.size()),
                  .max_tokens = 0,
                  .max_listed_pages = 0};
    for (size_t i = 0; i < batch.kv_len.size(); ++i) {
      limits.max_tokens += batch.queries[i];
      limits.max_listed_pages += (batch.kv_len[i] + geometry.page_size - 1) / geometry.page_size;
    }
    const ScheduleInput input = batch.input();
    Schedule schedule;
    make_schedule(input, model, schedule);
    EXPECT_LE(schedule.num_partial_rows,
              max_partial_rows(limits, geometry, batch.num_workers, batch.splits, model))
        << describe(batch, model, seed);
    EXPECT_LE(static_cast<int64_t>(schedule.tiles.size()),
              max_tiles(limits, geometry, batch.num_workers, batch.splits, model))
        << describe(batch, model, seed);
  }
}

TEST(ScheduleProperty, PrescribedPartialRowsOfOneTileAreExact) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    Draw draw(seed);
    const CostModel model = draw.model();
    const Geometry geometry{.num_heads = draw.one_of({1, 16, 128}), .page_size = 16};
    Limits limits{.max_rows = draw.between(1, 9),
                  .max_tokens = draw.between(1, 30),
                  .max_listed_pages = draw.between(0, 3000)};
    const SplitPolicy splits = draw.once_in(2)
                                   ? SplitPolicy{.fixed_tokens = draw.one_of({1, 7, 64, 4096})}
                                   : SplitPolicy{.forced_count = draw.one_of({1, 2, 3, 256})};
    if (splits.fixed_tokens > 0) {  // several row tiles of a request share its parts
      limits.max_tokens =
          std::min<int64_t>(limits.max_tokens, model.tile_rows / geometry.num_heads);
    }
    const int64_t stated = max_partial_rows(limits, geometry, 2, splits, model);
    // The batch that needs them: one request, with as many keys as give the most parts.
    const int64_t most_keys = limits.max_listed_pages * geometry.page_size;
    const int32_t step = splits.fixed_tokens > 0 ? splits.fixed_tokens : 1;
    const int64_t rounded = (step + model.split_align - 1) / model.split_align * model.split_align;
    TestBatch batch{.queries = {static_cast<int32_t>(limits.max_tokens)},
                    .kv_len = {static_cast<int32_t>(std::min(most_keys, rounded * kMaxSplits))},
                    .num_heads = geometry.num_heads,
                    .causal = false,
                    .splits = splits};
    Schedule schedule;
    make_schedule(batch.input(), model, schedule);
    EXPECT_EQ(schedule.num_partial_rows, stated) << describe(batch, model, seed);
  }
}

TEST(ScheduleProperty, PromptsUnderFixedSplitsShareThePartsOfOneTile) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    Draw draw(seed);
    const CostModel model = draw.model();
    TestBatch batch{.queries = {draw.between(1, 600)},
                    .kv_len = {draw.between(1, 100000)},
                    .num_heads = draw.one_of({1, 16, 128}),
                    .splits = {.fixed_tokens = draw.one_of({1, 64, 1000})}};
    Schedule schedule;
    make_schedule(batch.input(), model, schedule);
    const int64_t rows = int64_t{batch.queries[0]} * batch.num_heads;
    const int64_t row_tiles = (rows + model.tile_rows - 1) / model.tile_rows;
    EXPECT_LE(static_cast<int64_t>(schedule.tiles.size()), std::max<int64_t>(kMaxSplits, row_tiles))
        << describe(batch, model, seed);
  }
}

TEST(ScheduleProperty, ExtremeBatchesHoldForAllWorkerCounts) {
  const CostModel model{.tile_rows = 64,
                        .block_tokens = 64,
                        .tile_ns = 1500,
                        .block_ns = 500,
                        .block_row_ns = 5,
                        .partial_row_ns = 25,
                        .merge_ns = 2500,
                        .shares_keys = true};
  const std::vector<int32_t> ones(17000, 1);
  std::vector<int32_t> lengths(17000);
  for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = static_cast<int32_t>(i * 7919 % 9000);
  const TestBatch batches[] = {
      {},
      {.queries = {0}, .kv_len = {0}},
      {.queries = {0, 0, 0}, .kv_len = {0, 5, INT32_MAX}},
      {.queries = {1}, .kv_len = {0}},
      {.queries = {1}, .kv_len = {INT32_MAX}},
      {.queries = {67}, .kv_len = {300}, .num_heads = 128},
      {.queries = {9}, .kv_len = {4}, .num_heads = 128},
      {.queries = {1, 1, 7, 1, 33}, .kv_len = {900, 3, 7, 64, 40}, .num_heads = 128},
      {.queries = {70000}, .kv_len = {70000}, .num_heads = 1},
      {.queries = ones, .kv_len = lengths, .num_heads = 16},
      {.queries = {1, 1, 1}, .kv_len = {1, 100000, 1}, .num_heads = 1024},
  };
  for (const TestBatch& base : batches) {
    const int32_t step = base.kv_len.size() > 100 || base.num_heads == 1 ? 61 : 1;
    for (int32_t workers = 1; workers <= 264; workers += step) {
      for (const SplitPolicy splits :
           {SplitPolicy{}, SplitPolicy{.fixed_tokens = 4096}, SplitPolicy{.forced_count = 5}}) {
        for (const bool causal : {true, false}) {
          TestBatch batch = base;
          batch.num_workers = workers;
          batch.splits = splits;
          batch.causal = causal;
          SCOPED_TRACE(describe(batch, model, 0));
          ASSERT_NO_FATAL_FAILURE(check_everything(batch, model));
        }
      }
    }
  }
}

}  // namespace
}  // namespace mla::plan
