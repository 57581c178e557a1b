#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "plan/schedule.hpp"
#include "plan/schedule_checks.hpp"

// The schedules of one serving step, as text. After a wanted change:
//   MLA_REGENERATE_GOLDEN=1 build/release/tests/plan/schedule_golden_test
// writes the files anew in the source folder; look at the difference before it is committed.

namespace mla::plan {
namespace {

// Two prompt chunks, eight decode rows, one idle row, one padded row without keys, a verify step
// of four tokens and one query count above the keys.
TestBatch serving_mix() {
  return {.queries = {40, 1, 1, 1, 1, 0, 1, 1, 1, 1, 24, 4, 1, 6},
          .kv_len = {3000, 900, 3, 64, 20000, 500, 65, 4096, 1, 7000, 24, 1500, 0, 4},
          .num_heads = 16,
          .causal = true,
          .num_workers = 4};
}

constexpr CostModel kModel{.tile_rows = 64,
                           .block_tokens = 64,
                           .tile_ns = 1500,
                           .block_ns = 500,
                           .block_row_ns = 5,
                           .partial_row_ns = 25,
                           .merge_ns = 2500};

std::string text_of(const Schedule& schedule, const std::string& splits) {
  std::ostringstream text;
  text << "# The schedule of the batch serving_mix() in schedule_golden_test.cpp, " << splits
       << ";\n# written by that test with MLA_REGENERATE_GOLDEN=1.\n";
  for (size_t worker = 0; worker + 1 < schedule.worker_indptr.size(); ++worker) {
    text << "worker " << worker << "\n";
    for (int32_t i = schedule.worker_indptr[worker]; i < schedule.worker_indptr[worker + 1]; ++i) {
      const Tile& tile = schedule.tiles[static_cast<size_t>(i)];
      text << "  request " << tile.request << " rows " << tile.row_begin << "+" << tile.num_rows
           << " keys " << tile.kv_begin << ".." << tile.kv_end;
      if (tile.partial_begin >= 0) text << " partial " << tile.partial_begin;
      text << "\n";
    }
  }
  for (const Merge& merge : schedule.merges) {
    text << "merge request " << merge.request << " rows " << merge.row_begin << "+"
         << merge.num_rows << " of " << merge.num_partials << " from " << merge.partial_begin
         << "\n";
  }
  text << "partial rows " << schedule.num_partial_rows << ", most splits " << schedule.max_splits
       << "\n";
  return text.str();
}

void expect_golden(const SplitPolicy& policy, const std::string& name, const std::string& splits) {
  TestBatch batch = serving_mix();
  batch.splits = policy;
  const ScheduleInput input = batch.input();
  Schedule schedule;
  make_schedule(input, kModel, schedule);
  check_schedule(input, kModel, schedule);
  const std::string text = text_of(schedule, splits);
  const std::string path = MLA_GOLDEN_DIR "/" + name;
  if (std::getenv("MLA_REGENERATE_GOLDEN") != nullptr) {
    std::ofstream(path) << text;
    return;
  }
  std::ifstream file(path);
  ASSERT_TRUE(file) << path;
  std::ostringstream golden;
  golden << file.rdbuf();
  EXPECT_EQ(text, golden.str());
}

TEST(ScheduleGolden, ServingMixMatchesFile) {
  expect_golden({}, "serving_mix.txt", "automatic splits");
}

TEST(ScheduleGolden, ServingMixWithFixedSplitsMatchesFile) {
  expect_golden({.fixed_tokens = 1000}, "serving_mix_fixed.txt", "fixed splits of 1000 tokens");
}

TEST(ScheduleGolden, ServingMixWithForcedSplitsMatchesFile) {
  expect_golden({.forced_count = 3}, "serving_mix_forced.txt", "3 splits forced");
}

}  // namespace
}  // namespace mla::plan
