#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "mla/error.hpp"
#include "plan/row_tiles.hpp"
#include "plan/schedule.hpp"
#include "plan/schedule_checks.hpp"

namespace mla::plan {
namespace {

using ::testing::HasSubstr;

constexpr CostModel kModel{.tile_rows = 128,
                           .block_tokens = 64,
                           .split_align = 1,
                           .tile_ns = 500,
                           .block_ns = 2000,
                           .block_row_ns = 800,
                           .partial_row_ns = 200};

Schedule checked(TestBatch& batch, const CostModel& model = kModel) {
  Schedule schedule;
  const ScheduleInput input = batch.input();
  make_schedule(input, model, schedule);
  check_schedule(input, model, schedule);
  return schedule;
}

TEST(ScheduleUnit, EmptyBatchHasNoTiles) {
  for (TestBatch batch : {TestBatch{}, TestBatch{.queries = {0, 0}, .kv_len = {0, 9}}}) {
    const Schedule schedule = checked(batch);
    EXPECT_TRUE(schedule.tiles.empty());
    EXPECT_EQ(schedule.max_splits, 0);
  }
}

TEST(ScheduleUnit, RequestWithoutKeysGetsATileWithoutKeys) {
  TestBatch batch{.queries = {1, 1, 1}, .kv_len = {5, 0, 7}};
  EXPECT_EQ(checked(batch).tiles.size(), 3U);
}

TEST(ScheduleUnit, QueriesBeforeTheFirstKeyAreStillCovered) {
  TestBatch batch{.queries = {600}, .kv_len = {4}, .num_heads = 3};
  checked(batch);
}

TEST(ScheduleUnit, OneLongRequestIsSharedByAllWorkers) {
  TestBatch batch{.queries = {1}, .kv_len = {65536}, .num_workers = 16};
  const Schedule schedule = checked(batch);
  EXPECT_EQ(schedule.max_splits, 16);
}

TEST(ScheduleUnit, MoreRowTilesThanWorkers) {
  for (int32_t queries = 1; queries <= 1024; ++queries) {
    TestBatch batch{.queries = {queries}, .kv_len = {300}, .num_heads = 128, .num_workers = 132};
    CostModel model = kModel;
    model.tile_rows = 64;
    checked(batch, model);
  }
}

TEST(ScheduleUnit, ForcedCountMakesThatManyParts) {
  TestBatch batch{.queries = {1, 1, 1, 1}, .kv_len = {17, 33, 9, 0}, .splits = {.forced_count = 4}};
  const Schedule schedule = checked(batch);
  EXPECT_EQ(schedule.tiles.size(), 13U);
  EXPECT_EQ(schedule.merges.size(), 3U);
  EXPECT_EQ(schedule.max_splits, 4);
}

TEST(ScheduleUnit, ForcedPartsDifferByAtMostOneAlignmentUnit) {
  CostModel model = kModel;
  model.split_align = 16;
  for (int32_t keys = 1; keys < 700; ++keys) {
    for (const int32_t count : {2, 3, 7, 32}) {
      TestBatch batch{.queries = {1}, .kv_len = {keys}, .splits = {.forced_count = count}};
      const Schedule schedule = checked(batch, model);
      const int32_t units = (keys + 15) / 16;
      ASSERT_EQ(schedule.max_splits, std::min(count, units));
      for (const Tile& tile : schedule.tiles) {
        const int32_t part_units = (tile.kv_end - tile.kv_begin + 15) / 16;
        ASSERT_EQ(tile.kv_begin % 16, 0);
        ASSERT_GE(part_units, units / schedule.max_splits);
        ASSERT_LE(part_units, (units + schedule.max_splits - 1) / schedule.max_splits);
      }
    }
  }
}

TEST(ScheduleUnit, AutomaticCutsAreAtBlocks) {
  for (int32_t keys = 100; keys < 20000; keys += 97) {
    TestBatch batch{.queries = {1, 1}, .kv_len = {keys, 3 * keys}, .num_workers = 7};
    for (const Tile& tile : checked(batch).tiles) ASSERT_EQ(tile.kv_begin % 64, 0);
  }
}

TEST(ScheduleUnit, CausalRowTilesEndWhereTheirLastQuerySees) {
  CostModel model = kModel;
  model.tile_rows = 2;  // one query of two heads
  TestBatch batch{.queries = {5}, .kv_len = {2}, .num_heads = 2, .num_workers = 1};
  const Schedule schedule = checked(batch, model);
  ASSERT_EQ(schedule.tiles.size(), 5U);
  const int32_t seen[] = {0, 0, 0, 1, 2};
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(schedule.tiles[i].kv_end, seen[i]);
}

TEST(ScheduleUnit, DivisionWithoutDividingIsExact) {
  std::mt19937 random(1);
  const auto draw = [&] { return static_cast<int64_t>(random()); };
  for (int32_t i = 0; i < 200000; ++i) {
    const int64_t divisor = std::min(1 + (draw() >> (draw() % 32)), int64_t{1} << 31);
    const CeilDivider divide(divisor);
    const int64_t multiple = draw() % (INT32_MAX / divisor + 1) * divisor;
    for (const int64_t value : {multiple - 1, multiple, multiple + 1, draw() / 2, int64_t{0},
                                int64_t{1}, int64_t{INT32_MAX}}) {
      if (value < 0 || value > INT32_MAX) continue;
      ASSERT_EQ(divide(value), (value + divisor - 1) / divisor) << value << " / " << divisor;
    }
  }
}

TEST(ScheduleUnit, FixedSplitsDoNotDependOnTheBatch) {
  TestBatch alone{.queries = {1}, .kv_len = {1000}, .splits = {.fixed_tokens = 96}};
  EXPECT_EQ(checked(alone).max_splits, 11);
  TestBatch longer{.queries = {1}, .kv_len = {1000000}, .splits = {.fixed_tokens = 96}};
  EXPECT_EQ(checked(longer).max_splits, 255);  // parts of 41 * 96 tokens
}

TEST(ScheduleUnit, TooManyTilesAreRefusedWithTheNumber) {
  TestBatch batch{.queries = {INT32_MAX}, .kv_len = {5}, .num_heads = 1024};
  Schedule schedule;
  try {
    make_schedule(batch.input(), kModel, schedule);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.parts().got, HasSubstr("17179869177"));  // INT32_MAX * 8 + 1
  }
}

}  // namespace
}  // namespace mla::plan
