#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "plan/schedule.hpp"
#include "plan/schedule_checks.hpp"
#include "support/allocations.hpp"

namespace mla::plan {
namespace {

TEST(ScheduleAllocation, AReusedScheduleStopsAllocating) {
  const CostModel model{.tile_rows = 64,
                        .block_tokens = 64,
                        .tile_ns = 1500,
                        .block_ns = 500,
                        .block_row_ns = 5,
                        .partial_row_ns = 25,
                        .shares_keys = true};
  std::vector<TestBatch> steps;
  for (const SplitPolicy splits :
       {SplitPolicy{}, SplitPolicy{.fixed_tokens = 512}, SplitPolicy{.forced_count = 7}}) {
    for (int32_t step = 0; step < 20; ++step) {
      TestBatch batch{.num_heads = 16, .num_workers = 132, .splits = splits};
      for (int32_t i = 0; i < 128; ++i) {
        batch.queries.push_back(i % 64 == 0 ? 200 : 1);
        batch.kv_len.push_back((i * 7919 + step * 31) % 9000 + 200);
      }
      steps.push_back(batch);
      batch.queries.assign(batch.kv_len.size(), 8);  // two row tiles each: teams
      steps.push_back(batch);
    }
  }
  Schedule schedule;
  for (TestBatch& batch : steps) make_schedule(batch.input(), model, schedule);
  int64_t in_steady_state = 0;
  for (TestBatch& batch : steps) {
    const ScheduleInput input = batch.input();
    const int64_t before = test::num_allocations();
    make_schedule(input, model, schedule);
    in_steady_state += test::num_allocations() - before;
  }
  EXPECT_EQ(in_steady_state, 0);
  EXPECT_GT(test::num_allocations(), 0);  // they are counted
}

}  // namespace
}  // namespace mla::plan
