#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "device/host_runtime.hpp"
#include "engine/kv_rows.hpp"
#include "engine/slot_buffers.hpp"
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

// Two slots of a bucket in turn.
TEST(KvResourceUnit, SteadyLeasedStepsAllocateNothing) {
  LatentPool pool(small_pool(64, 4));
  KvResource kv(pool, {.check_every_call = false});
  kv.open({.request = 1});
  Step step;
  step.part<KvStep>("kv").segments = {{.request = 1, .span = 3}};
  const PlanResults none;
  std::array leases = {
      SlotLease{.slot = 0, .bucket = GraphBucket{"decode", {.num_rows = 2, .num_tokens = 8}}},
      SlotLease{.slot = 1, .bucket = GraphBucket{"decode", {.num_rows = 2, .num_tokens = 8}}}};
  const auto run_round = [&] {
    for (const SlotLease& lease : leases) {
      if (!kv.admit(step)) std::abort();
      kv.plan(step, {.lease = lease, .results = none});
      kv.commit();
      kv.trim({.request = 1}, 3);
    }
  };
  for (int i = 0; i < 4; ++i) run_round();
  const int64_t before = test::num_allocations();
  run_round();
  EXPECT_EQ(test::num_allocations(), before);
}

// The slots of those steps on a device that queues its work: one label, then another with the first
// one's left without rows.
TEST(SlotBuffersUnit, StagingAgainAllocatesNothing) {
  test::HostRuntime runtime;
  SlotBuffers buffers(runtime);
  const SlotLease lease{.bucket = GraphBucket{"decode", {.num_rows = 2, .num_tokens = 4}}};
  const std::array<int64_t, 4> slots = {7, 8, -1, -1};
  const std::array<LabelPlan, 2> plans = {LabelPlan{.label = "main", .slots = slots},
                                          LabelPlan{.label = "draft", .slots = slots}};
  std::vector<device::StagedBuffer*> staged;
  const auto first = [&](device::StagedBuffer* buffer) {
    return *reinterpret_cast<const int64_t*>(buffer->device_data());
  };
  const auto run_round = [&] {
    buffers.stage(lease, plans, {}, staged);
    buffers.stage(lease, std::span(plans).last(1), {}, staged);
  };
  run_round();
  const int64_t before = test::num_allocations();
  for (int i = 0; i < 6; ++i) run_round();
  EXPECT_EQ(test::num_allocations(), before);
  ASSERT_EQ(staged.size(), 2U);
  EXPECT_EQ(first(staged[0]), 7) << "of the label that is planned";
  EXPECT_EQ(first(staged[1]), -1) << "of the other one";
}

}  // namespace
}  // namespace mla::engine
