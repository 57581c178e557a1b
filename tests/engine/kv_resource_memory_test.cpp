#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "engine/kv_rows.hpp"
#include "mla/kv_resource.hpp"
#include "support/allocations.hpp"

namespace mla::engine {
namespace {

TEST(KvResourceUnit, SteadyStepsAllocateNothing) {
  constexpr int32_t kPageSize = 4;
  LatentPool pool(small_pool(64, kPageSize));
  KvResource kv(pool, {.check_every_call = false});
  std::vector<Segment> step;
  for (RequestId request = 0; request < 8; ++request) {
    kv.open({request, "main"});
    kv.open({request, "draft"});
    step.push_back({request, "main", 3});
    step.push_back({request, "draft", 1});
  }
  const std::vector<float> rows(24 * 3);
  const auto view = contiguous_view(rows.data(), std::array<int64_t, 2>{24, 3});
  const auto run_step = [&] {
    if (!kv.admit(step)) std::abort();
    kv.plan();
    kv.write(0, "main", columns(view, 0, 2), columns(view, 2, 1));
    kv.commit();
    for (const Segment& segment : step) kv.trim({segment.request, segment.label}, segment.span - 1);
  };
  // Each stream grows by a token a step, over a page, and is cut back.
  const auto run_round = [&] {
    for (int i = 0; i < 5; ++i) run_step();
    for (const Segment& segment : step) kv.trim({segment.request, segment.label}, 5);
  };
  for (int i = 0; i < 4; ++i) run_round();
  const int64_t before = test::num_allocations();
  run_round();
  EXPECT_EQ(test::num_allocations(), before);
  EXPECT_GT(before, 0) << "they are counted";
}

}  // namespace
}  // namespace mla::engine
