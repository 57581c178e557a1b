#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "plan/schedule.hpp"
#include "plan/schedule_checks.hpp"

namespace mla::plan {
namespace {

// Two cores: a block of 64 keys against 16 rows takes 17 us, a partial row 0.3 us.
constexpr CostModel kCores{.tile_rows = 128,
                           .block_tokens = 64,
                           .tile_ns = 1000,
                           .block_ns = 1000,
                           .block_row_ns = 1000,
                           .partial_row_ns = 300,
                           .merge_ns = 3000};
// A GPU of 132 multiprocessors, as its split and merge costs were measured: 24 ns for each part
// that is merged, 2.5 us for a barrier.
constexpr CostModel kProcessors{.tile_rows = 64,
                                .block_tokens = 64,
                                .tile_ns = 1500,
                                .block_ns = 600,
                                .block_row_ns = 4,
                                .partial_row_ns = 24,
                                .merge_ns = 2500};

double finish_of(TestBatch batch, const CostModel& model, SplitPolicy splits) {
  batch.splits = splits;
  Schedule schedule;
  make_schedule(batch.input(), model, schedule);
  return finish_ns(schedule, model);
}

/// The best of what a user could force.
double best_of_sweep(const TestBatch& batch, const CostModel& model) {
  double best = finish_of(batch, model, {.forced_count = 1});
  for (const int32_t count : {2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13,  14,  15, 16,
                              18, 20, 22, 24, 28, 32, 40, 44, 48, 56, 64, 100, 128, 132}) {
    best = std::min(best, finish_of(batch, model, {.forced_count = count}));
  }
  return best;
}

TestBatch equal_rows(int32_t rows, int32_t keys, int32_t heads, int32_t workers) {
  return {.queries = std::vector<int32_t>(static_cast<size_t>(rows), 1),
          .kv_len = std::vector<int32_t>(static_cast<size_t>(rows), keys),
          .num_heads = heads,
          .num_workers = workers};
}

// Too few parts leave workers idle, too many are merged for nothing (ROCm/aiter PR 4899,
// flashinfer PR 4904).
TEST(ScheduleLoad, AutomaticSplitsAreWithin3PercentOfTheBestForcedCount) {
  for (const int32_t workers : {2, 16, 66, 132}) {
    CostModel model = workers <= 16 ? kCores : kProcessors;
    model.shares_keys = workers > 16;  // two row tiles of 64 rows at 128 heads: teams
    for (const int32_t heads : {16, 128}) {
      for (const int32_t rows : {1, 2, 3, 8, 32, 64, 100, 133, 200}) {
        for (const int32_t keys : {512, 1024, 4096, 8192, 32768, 131072}) {
          const TestBatch batch = equal_rows(rows, keys, heads, workers);
          EXPECT_LE(finish_of(batch, model, {}), 1.03 * best_of_sweep(batch, model))
              << workers << " workers, " << rows << " rows of " << keys << " keys, H" << heads;
        }
      }
    }
  }
}

// By the caps. A plan may have a little less than its cap on the heaviest worker: 1 %.
TEST(ScheduleLoad, TeamsFinishAtMostASixteenthLater) {
  CostModel shared = kProcessors;
  shared.shares_keys = true;
  int32_t teams = 0;
  for (const int32_t workers : {66, 132}) {
    for (const int32_t queries : {1, 2, 3, 4, 5, 7}) {  // two row tiles each
      for (const int32_t rows : {1, 2, 3, 8, 32, 64, 100, 133, 200}) {
        for (const int32_t keys : {1024, 4096, 8192, 32768, 131072}) {
          TestBatch batch = equal_rows(rows, keys, 128, workers);
          batch.queries.assign(static_cast<size_t>(rows), queries);
          Schedule schedule;
          make_schedule(batch.input(), shared, schedule);
          EXPECT_LE(finish_ns(schedule, shared),
                    (1 + 1.0 / 16) * 1.01 * finish_of(batch, kProcessors, {}))
              << workers << " workers, " << rows << " rows of " << queries << " tokens, " << keys
              << " keys";
          // The second worker has the second row tile from its first key on.
          const Tile& tile = schedule.tiles[static_cast<size_t>(schedule.worker_indptr[1])];
          if (tile.row_begin == 64 && tile.kv_begin == 0) ++teams;
        }
      }
    }
  }
  EXPECT_GT(teams, 400);
}

TEST(ScheduleLoad, OneLongRequestUsesTheWholeMachine) {
  const TestBatch batch = equal_rows(1, 131072, 16, 132);
  EXPECT_LT(10 * finish_of(batch, kProcessors, {}),
            finish_of(batch, kProcessors, {.forced_count = 1}));
  const TestBatch verify{.queries = {4}, .kv_len = {81920}, .num_heads = 16, .num_workers = 132};
  EXPECT_LT(10 * finish_of(verify, kProcessors, {}),
            finish_of(verify, kProcessors, {.forced_count = 1}));
}

TEST(ScheduleLoad, ShortRequestsAreNotSplit) {
  for (const int32_t rows : {1, 3, 64, 132, 1000}) {
    TestBatch batch = equal_rows(rows, 64, 16, 132);
    Schedule schedule;
    make_schedule(batch.input(), kProcessors, schedule);
    EXPECT_EQ(schedule.max_splits, 1) << rows << " rows";
  }
}

TEST(ScheduleLoad, TilesThatDivideEvenlyAreNotSplit) {
  for (const int32_t workers : {2, 16, 132}) {
    for (const int32_t each : {1, 2, 7, 31}) {
      TestBatch batch = equal_rows(workers * each, 4096, 16, workers);
      Schedule schedule;
      make_schedule(batch.input(), kProcessors, schedule);
      EXPECT_EQ(schedule.max_splits, 1) << workers << " workers, " << each << " rows each";
    }
  }
}

// Log-normal lengths, as a serving batch has them: what is lost against an even share that costs
// nothing to make.
TEST(ScheduleLoad, UnevenLengthsAreSharedOutEvenly) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  for (const int32_t rows : {32, 128, 1000}) {
    TestBatch batch{.num_heads = 16, .num_workers = 132};
    for (int32_t i = 0; i < rows; ++i) {
      batch.queries.push_back(1);
      batch.kv_len.push_back(
          std::max(1, static_cast<int32_t>(2048 * std::exp(1.2 * normal(random)))));
    }
    Schedule schedule;
    make_schedule(batch.input(), kProcessors, schedule);
    double total = 0;
    for (const int32_t keys : batch.kv_len) {
      total += cost_of({.num_rows = 16, .kv_end = keys}, kProcessors);
    }
    const double share = total / batch.num_workers;
    const double part_ns = kProcessors.tile_ns + 16 * kProcessors.partial_row_ns;
    const double block_ns = kProcessors.block_ns + 16 * kProcessors.block_row_ns;
    EXPECT_LE(heaviest_worker(schedule, kProcessors), share + 2 * part_ns + block_ns)
        << rows << " rows";
  }
}

}  // namespace
}  // namespace mla::plan
