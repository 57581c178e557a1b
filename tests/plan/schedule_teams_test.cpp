#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "plan/schedule.hpp"
#include "plan/schedule_checks.hpp"

namespace mla::plan {
namespace {

constexpr CostModel kModel{.tile_rows = 128,
                           .block_tokens = 64,
                           .tile_ns = 4000,
                           .block_ns = 2100,
                           .partial_row_ns = 20,
                           .merge_ns = 5000,
                           .shares_keys = true};

Schedule checked(TestBatch& batch, const CostModel& model = kModel) {
  Schedule schedule;
  const ScheduleInput input = batch.input();
  make_schedule(input, model, schedule);
  check_schedule(input, model, schedule);
  return schedule;
}

/// Requests of `queries` tokens of 128 heads.
TestBatch verify_step(int32_t queries, const std::vector<int32_t>& kv_len, int32_t workers,
                      bool causal) {
  return {.queries = std::vector<int32_t>(kv_len.size(), queries),
          .kv_len = kv_len,
          .num_heads = 128,
          .causal = causal,
          .num_workers = workers};
}

std::span<const Tile> tiles_of(const Schedule& schedule, int32_t worker) {
  const auto at = static_cast<size_t>(worker);
  const auto begin = static_cast<size_t>(schedule.worker_indptr[at]);
  return std::span(schedule.tiles)
      .subspan(begin, static_cast<size_t>(schedule.worker_indptr[at + 1]) - begin);
}

/// Proves that workers team * size + member have row tile `member` of each request that their team
/// has, and the same keys as the team's last member, who sees the most, as far as they see them.
void check_teams(const ScheduleInput& input, const CostModel& model, int32_t size,
                 const Schedule& schedule) {
  const int32_t num_teams = input.num_workers / size;
  for (int32_t team = 0; team < num_teams; ++team) {
    const std::span<const Tile> last = tiles_of(schedule, team * size + size - 1);
    for (int32_t member = 0; member < size; ++member) {
      const std::span<const Tile> tiles = tiles_of(schedule, team * size + member);
      size_t at = 0;
      for (const Tile& team_tile : last) {
        const auto request = static_cast<size_t>(team_tile.request);
        const int64_t row = int64_t{member} * model.tile_rows;
        const int64_t rows =
            int64_t{input.qo_indptr[request + 1] - input.qo_indptr[request]} * input.num_heads;
        const int64_t last_row = std::min(row + model.tile_rows, rows) - 1;
        const int64_t seen = visible_keys(input, request, last_row / input.num_heads);
        if (team_tile.kv_begin > 0 && team_tile.kv_begin >= seen) continue;
        ASSERT_LT(at, tiles.size());
        const Tile& tile = tiles[at++];
        ASSERT_EQ(tile.request, team_tile.request);
        ASSERT_EQ(tile.row_begin, row);
        ASSERT_EQ(tile.kv_begin, team_tile.kv_begin);
        ASSERT_EQ(tile.kv_end, std::min<int64_t>(team_tile.kv_end, seen));
      }
      ASSERT_EQ(at, tiles.size());
    }
  }
  for (int32_t worker = num_teams * size; worker < input.num_workers; ++worker) {
    ASSERT_TRUE(tiles_of(schedule, worker).empty());
  }
}

/// Each member of a team has the row tiles of its place.
void check_members(const Schedule& schedule, int32_t size) {
  for (int32_t worker = 0; static_cast<size_t>(worker) + 1 < schedule.worker_indptr.size();
       ++worker) {
    for (const Tile& tile : tiles_of(schedule, worker)) {
      ASSERT_EQ(tile.row_begin / kModel.tile_rows % size, worker % size)
          << "request " << tile.request;
    }
  }
}

TEST(ScheduleTeams, MembersReadTheSameKeysUnderTheBoundOfTheirTeams) {
  std::mt19937 random(1);
  const auto between = [&](int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random() % static_cast<uint32_t>(high - low + 1));
  };
  int32_t cut = 0;
  for (int32_t step = 0; step < 1000; ++step) {
    CostModel model = kModel;
    model.tile_rows = step % 2 == 0 ? 128 : 64;
    const int32_t queries = between(2, 8);
    const int32_t size = queries * 128 / model.tile_rows;
    const int32_t workers = size * between(1, 30);  // none is left over
    std::vector<int32_t> kv_len(static_cast<size_t>(between(1, 100)));
    const int32_t most_keys = between(0, 1) == 0 ? 2000 : 50000;
    for (int32_t& keys : kv_len) keys = between(1000, most_keys);
    TestBatch batch = verify_step(queries, kv_len, workers, step % 4 < 2);
    SCOPED_TRACE("step " + std::to_string(step));
    const Schedule schedule = checked(batch, model);
    const ScheduleInput input = batch.input();
    ASSERT_NO_FATAL_FAILURE(check_teams(input, model, size, schedule));
    std::vector<Tile> team_tiles;
    for (const int32_t keys : kv_len) {
      team_tiles.push_back({.num_rows = model.tile_rows, .kv_end = keys});
    }
    ASSERT_LE(heaviest_worker(schedule, model),
              load_bound(team_tiles, workers / size, true, model) * (1 + 1e-6));
    if (schedule.max_splits > 1) ++cut;
  }
  EXPECT_GT(cut, 100);
}

TEST(ScheduleTeams, AFewWorkersMayBeLeftOver) {
  TestBatch batch = verify_step(4, std::vector<int32_t>(64, 4096), 66, true);
  const Schedule schedule = checked(batch);
  check_teams(batch.input(), kModel, 4, schedule);
}

// A captured graph's unused tokens, in one request without keys.
TEST(ScheduleTeams, PaddingIsDealtToTeamsOfTheOthersSize) {
  for (const int32_t unused : {1, 4, 7, 56}) {
    TestBatch batch = verify_step(4, std::vector<int32_t>(50, 4096), 132, true);
    batch.queries.push_back(unused);
    batch.kv_len.push_back(0);
    ASSERT_NO_FATAL_FAILURE(check_members(checked(batch), 4)) << unused << " unused tokens";
  }
}

TEST(ScheduleTeams, AChunkOfAPromptIsDealtToTeamsOfTheOthersSize) {
  TestBatch batch = verify_step(4, std::vector<int32_t>(64, 8192), 132, true);
  batch.queries.push_back(102);  // 25 teams' tiles and a half
  batch.kv_len.push_back(9000);
  check_members(checked(batch), 4);
}

// Two queries of four heads, a tile each: the first does not see the last key.
TEST(ScheduleTeams, APartThatARowTileDoesNotSeeIsLeftOut) {
  const CostModel model{.tile_rows = 4, .block_tokens = 1, .block_ns = 1000, .shares_keys = true};
  // Twenty teams take one key each of the first request.
  TestBatch batch{.queries = {2}, .kv_len = {20}, .num_heads = 4, .num_workers = 40};
  const Schedule schedule = checked(batch, model);
  ASSERT_EQ(schedule.tiles.size(), 39U);
  EXPECT_TRUE(tiles_of(schedule, 38).empty());
  ASSERT_EQ(tiles_of(schedule, 39).size(), 1U);
  EXPECT_EQ(tiles_of(schedule, 39)[0].kv_begin, 19);
  ASSERT_EQ(schedule.merges.size(), 2U);
  EXPECT_EQ(schedule.merges[0].num_partials, 19);
  EXPECT_EQ(schedule.merges[1].num_partials, 20);
}

// Where teams would be worse, or are not wanted, the plan is the one without them.
TEST(ScheduleTeams, OtherPlansAreAsWithout) {
  const std::vector<int32_t> lengths(64, 4096);
  TestBatch one_row_tile = verify_step(1, lengths, 132, true);
  TestBatch one_of_one_row_tile = verify_step(4, lengths, 132, true);
  one_of_one_row_tile.queries[17] = 1;
  TestBatch uneven = verify_step(4, lengths, 132, true);
  for (size_t i = 0; i < lengths.size(); i += 2) uneven.queries[i] = 3;
  const TestBatch too_many_left_over = verify_step(20, lengths, 132, true);
  const TestBatch more_row_tiles_than_workers = verify_step(8, lengths, 7, true);
  TestBatch prompts = verify_step(512, std::vector<int32_t>(64, 512), 128, true);
  prompts.num_heads = 16;  // the first of 64 row tiles sees 8 keys, the last all
  TestBatch half_a_tile = verify_step(1, lengths, 132, true);
  half_a_tile.num_heads = 130;
  TestBatch fixed = verify_step(4, lengths, 132, true);
  fixed.splits = {.fixed_tokens = 512};
  TestBatch forced = verify_step(4, lengths, 132, true);
  forced.splits = {.forced_count = 3};
  CostModel by_rows = kModel;
  by_rows.block_row_ns = 100;
  const CostModel models[] = {kModel, by_rows};
  for (TestBatch batch : {one_row_tile, one_of_one_row_tile, uneven, too_many_left_over,
                          more_row_tiles_than_workers, prompts, half_a_tile, fixed, forced}) {
    for (CostModel model : models) {
      if (batch.num_heads == 130 && model.block_row_ns == 0) continue;
      SCOPED_TRACE(std::to_string(batch.queries[0]) + " queries, H" +
                   std::to_string(batch.num_heads));
      const Schedule with = checked(batch, model);
      model.shares_keys = false;
      ASSERT_NO_FATAL_FAILURE(expect_same(with, checked(batch, model)));
    }
  }
}

// Teams of as many members as one request has row tiles, beside many requests of one row tile.
TEST(ScheduleTeams, MemoryIsOfTheTilesThatThereAre) {
  TestBatch batch{.queries = std::vector<int32_t>(2000, 1),
                  .kv_len = std::vector<int32_t>(2000, 0),
                  .num_heads = 128,
                  .num_workers = 66};
  batch.queries[0] = 66;
  batch.kv_len[0] = 1 << 22;
  const Schedule schedule = checked(batch);
  EXPECT_EQ(schedule.teams.size(), 1U);
  EXPECT_LE(schedule.tiles.capacity(), 66 + 2000 + 66);
}

}  // namespace
}  // namespace mla::plan
