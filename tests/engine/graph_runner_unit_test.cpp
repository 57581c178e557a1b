#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/runtime.hpp"
#include "device/staging.hpp"
#include "mla/error.hpp"
#include "mla/graph_runner.hpp"
#include "mla/recording_device.hpp"

namespace mla {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

struct NumberStep : ResourceStep {
  static constexpr const char* kKind = "NumberStep";
  NumberStep() : ResourceStep(kKind) {}
  int value = 0;
};

// Stages one number a step, per slot, as an attention stages its plan; `careless` writes the
// device's copy from one host buffer instead, the fault that force_double_buffer is there for.
class NumberResource : public Resource {
 public:
  NumberResource(device::Runtime& runtime, bool careless = false)
      : careless_(careless),
        runtime_(runtime),
        slots_{std::make_unique<device::StagedBuffer>(runtime, sizeof(int)),
               std::make_unique<device::StagedBuffer>(runtime, sizeof(int))} {}

  const std::string& key() const noexcept override { return key_; }
  bool force_double_buffer() const noexcept override { return careless_; }
  const ResourcePlan& plan(const Step& step, const PlanContext& context) override {
    const int value = step.get<NumberStep>(key_).value;
    const auto slot = static_cast<size_t>(context.lease.slot);
    if (careless_) {
      host_[slot] = value;
      runtime_.copy_to_device(slots_[slot]->device_data(), &host_[slot], sizeof(int),
                              context.stream);
    } else {
      std::memcpy(slots_[slot]->begin_write(context.stream), &value, sizeof(value));
      slots_[slot]->end_write(sizeof(value), context.stream);
    }
    slot_ = slot;
    return plan_;
  }
  void order_replay(Stream stream) override { slots_[slot_]->order_readers(stream); }
  void size_graph_buffers(const GraphShape& largest) override { shapes.push_back(largest); }

  // Queues a read of the current slot's number.
  void read(Stream stream, std::vector<int>& seen) {
    slots_[slot_]->order_readers(stream);
    runtime_.submit(stream, "read", [data = slots_[slot_]->device_data(), &seen] {
      int value = 0;
      std::memcpy(&value, data, sizeof(value));
      seen.push_back(value);
    });
  }

  std::vector<GraphShape> shapes;

 private:
  struct Plan : ResourcePlan {
    Plan() : ResourcePlan("NumberPlan") {}
  };
  std::string key_ = "number";
  bool careless_;
  device::Runtime& runtime_;
  std::array<std::unique_ptr<device::StagedBuffer>, 2> slots_;
  std::array<int, 2> host_{};
  size_t slot_ = 0;
  Plan plan_;
};

struct GraphRunnerUnit : testing::Test {
  RecordingDevice device;
  device::Runtime& runtime = device::runtime_of(device.device());
  NumberResource number{runtime};
  StepRunner steps{&number};
  Stream stream = device.create_stream();
  std::vector<int> seen;
  int num_bodies = 0;

  GraphOptions options() const {
    return {.device = device.device(),
            .buckets = {{"decode", {.num_rows = 8, .num_tokens = 8}},
                        {"decode", {.num_rows = 2, .num_tokens = 2}},
                        {"prefill", {.num_rows = 1, .num_tokens = 64}}}};
  }
  void step(StepRunner& runner, NumberResource& resource, GraphRunner& graphs, int value,
            int64_t num_rows, Stream planning) {
    Step wanted;
    wanted.part<NumberStep>("number").value = value;
    const SlotLease lease = graphs.lease("decode", num_rows, num_rows);
    ASSERT_TRUE(runner.admit(wanted));
    runner.plan(wanted, lease, planning);
    graphs.run(lease, stream, [&](Stream s) {
      ++num_bodies;
      resource.read(s, seen);
    });
    runner.commit();
  }
};

TEST_F(GraphRunnerUnit, PicksTheSmallestBucketThatHoldsTheBatchAndAlternatesSlots) {
  GraphRunner graphs(steps, options());
  const SlotLease small = graphs.lease("decode", 1, 2);
  EXPECT_EQ(small.bucket->shape.num_rows, 2);
  EXPECT_EQ(small.slot, 0);
  const SlotLease large = graphs.lease("decode", 3, 3);
  EXPECT_EQ(large.bucket->shape.num_rows, 8);
  EXPECT_EQ(large.slot, 1);
  EXPECT_FALSE(graphs.lease("decode", 9, 9).bucket) << "fits none: eager";
  EXPECT_FALSE(graphs.lease("verify", 1, 1).bucket) << "no such walk";
  EXPECT_EQ(graphs.lease("prefill", 1, 40).bucket->shape.num_tokens, 64);
}

TEST_F(GraphRunnerUnit, SizesGraphBuffersOnceAtTheLargestShape) {
  const GraphRunner graphs(steps, options());
  ASSERT_EQ(number.shapes.size(), 1U);
  EXPECT_EQ(number.shapes[0].num_rows, 8);
  EXPECT_EQ(number.shapes[0].num_tokens, 64);
}

TEST_F(GraphRunnerUnit, CapturesOncePerBucketAndSlotThenReplays) {
  GraphRunner graphs(steps, options());
  for (int value = 1; value <= 10; ++value) step(steps, number, graphs, value, 2, stream);
  EXPECT_EQ(num_bodies, 2) << "one capture for each of the two slots";
  device.finish_all();
  EXPECT_THAT(seen, ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10));
  step(steps, number, graphs, 11, 5, stream);
  EXPECT_EQ(num_bodies, 3) << "another bucket";
  device.finish_all();
  EXPECT_THAT(device.violations(), IsEmpty());
}

TEST_F(GraphRunnerUnit, ReplaysSeeTheirOwnPlanFromAnyPlanningStream) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    GraphRunner graphs(steps, options());
    const std::array planning = {device.create_stream(), device.create_stream(), stream};
    seen.clear();
    std::vector<int> expected;
    for (int value = 1; value <= 30; ++value) {
      step(steps, number, graphs, value, 2, planning[static_cast<size_t>(value * 7) % 3]);
      expected.push_back(value);
    }
    device.finish_all(seed);
    ASSERT_EQ(seen, expected) << "seed " << seed;
    ASSERT_THAT(device.violations(), IsEmpty());
  }
}

TEST_F(GraphRunnerUnit, EagerStepsCallTheirBody) {
  GraphRunner graphs(steps, options());
  for (int value = 1; value <= 3; ++value) step(steps, number, graphs, value, 100, stream);
  EXPECT_EQ(num_bodies, 3);
  device.finish_all();
  EXPECT_THAT(seen, ElementsAre(1, 2, 3));
}

// A resource without a ring is safe only if a slot is not planned into before its last replay.
TEST_F(GraphRunnerUnit, DoubleBuffersForAResourceThatNeedsIt) {
  NumberResource careless(runtime, true);
  StepRunner runner{&careless};
  GraphRunner graphs(runner, options());
  for (int value = 1; value <= 6; ++value) step(runner, careless, graphs, value, 2, stream);
  EXPECT_GT(device.num_host_waits(), 0);
  device.finish_all();
  EXPECT_THAT(seen, ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(device.violations(), IsEmpty());
}

TEST_F(GraphRunnerUnit, PiecesAreCapturedApartWithEagerWorkBetweenThem) {
  GraphRunner graphs(steps, options());
  std::vector<std::string> order;
  const auto piece = [&](const SlotLease& lease, const char* name) {
    graphs.run(
        lease, stream,
        [&](Stream s) { runtime.submit(s, name, [&order, name] { order.emplace_back(name); }); },
        name);
  };
  for (int round = 0; round < 3; ++round) {
    Step wanted;
    wanted.part<NumberStep>("number").value = round;
    const SlotLease lease = graphs.lease("decode", 1, 1);
    ASSERT_TRUE(steps.admit(wanted));
    steps.plan(wanted, lease, stream);
    piece(lease, "first");
    runtime.submit(stream, "eager", [&order] { order.emplace_back("eager"); });
    piece(lease, "second");
    steps.commit();
    EXPECT_TRUE(graphs.is_captured(lease, "first"));
    EXPECT_FALSE(graphs.is_captured(lease));
  }
  device.finish_all();
  EXPECT_THAT(order, ElementsAre("first", "eager", "second", "first", "eager", "second", "first",
                                 "eager", "second"));
}

TEST_F(GraphRunnerUnit, AFailedCaptureLeavesNothingBehind) {
  GraphRunner graphs(steps, options());
  Step wanted;
  wanted.part<NumberStep>("number").value = 5;
  const SlotLease lease = graphs.lease("decode", 1, 1);
  ASSERT_TRUE(steps.admit(wanted));
  steps.plan(wanted, lease, stream);
  EXPECT_THROW(graphs.run(lease, stream, [](Stream) { throw std::runtime_error("model"); }),
               std::runtime_error);
  EXPECT_FALSE(runtime.is_capturing(stream));
  EXPECT_FALSE(graphs.is_captured(lease));
  graphs.run(lease, stream, [&](Stream s) { number.read(s, seen); });
  device.finish_all();
  EXPECT_THAT(seen, ElementsAre(5));
}

TEST_F(GraphRunnerUnit, ABodyThatBreaksTheCaptureIsToldByItsOwnError) {
  GraphRunner graphs(steps, options());
  Step wanted;
  wanted.part<NumberStep>("number");
  const SlotLease lease = graphs.lease("decode", 1, 1);
  ASSERT_TRUE(steps.admit(wanted));
  steps.plan(wanted, lease, stream);
  EXPECT_THROW(graphs.run(lease, stream,
                          [&](Stream s) {
                            runtime.destroy_graph(runtime.end_capture(s));
                            throw std::runtime_error("model");
                          }),
               std::runtime_error);
}

TEST_F(GraphRunnerUnit, IsDestroyedOnADeviceThatFails) {
  const auto fail = [&] {
    runtime.submit(stream, "fault", [] { throw CudaError({"fault", "kernel", "", ""}, 700); });
  };
  {
    GraphRunner graphs(steps, options());
    step(steps, number, graphs, 1, 2, stream);
    fail();
    EXPECT_THROW(graphs.clear(), CudaError);
    const SlotLease lease = graphs.lease("decode", 2, 2);
    EXPECT_TRUE(graphs.is_captured({.slot = 1 - lease.slot, .bucket = lease.bucket})) << "kept";
    fail();
  }  // whose destructor must not throw
  device.finish_all();
  EXPECT_THAT(device.violations(), IsEmpty());
}

TEST_F(GraphRunnerUnit, RefusesWhatItCannotServe) {
  GraphOptions none = options();
  none.device = Device{};
  EXPECT_THROW(GraphRunner(steps, none), InvalidArgument) << "the cpu has no graphs";
  none.buckets.clear();
  EXPECT_NO_THROW(GraphRunner(steps, none)) << "eager only";
  GraphOptions twice = options();
  twice.buckets.push_back(twice.buckets.front());
  EXPECT_THROW(GraphRunner(steps, twice), InvalidArgument);
  GraphOptions empty = options();
  empty.buckets[0].shape.num_tokens = 0;
  EXPECT_THROW(GraphRunner(steps, empty), InvalidArgument);
  GraphOptions no_slots = options();
  no_slots.num_slots = 0;
  EXPECT_THROW(GraphRunner(steps, no_slots), InvalidArgument);
  no_slots.num_slots = std::numeric_limits<int32_t>::max();
  EXPECT_THROW(GraphRunner(steps, no_slots), InvalidArgument);
  GraphRunner graphs(steps, options());
  const auto nothing = [](Stream) {};
  EXPECT_THROW(graphs.run({.slot = 2}, stream, nothing), InvalidArgument);
  EXPECT_THROW(graphs.run({.slot = 0, .bucket = GraphBucket{"decode", {3, 3}}}, stream, nothing),
               InvalidArgument);
}

// A graph reads the plan of its slot: run at another time it would do another step's work again.
TEST_F(GraphRunnerUnit, RunsThePlannedStepInItsOwnSlotOnly) {
  GraphRunner graphs(steps, options());
  for (int value = 1; value <= 2; ++value) step(steps, number, graphs, value, 2, stream);
  const SlotLease first = graphs.lease("decode", 2, 2);
  const SlotLease second = graphs.lease("decode", 2, 2);
  const auto body = [&](Stream s) { number.read(s, seen); };
  EXPECT_THROW(graphs.run(first, stream, body), InvalidState) << "nothing is planned";
  Step wanted;
  wanted.part<NumberStep>("number").value = 3;
  ASSERT_TRUE(steps.admit(wanted));
  EXPECT_THROW(graphs.run(first, stream, body), InvalidState) << "admitted only";
  steps.plan(wanted, first, stream);
  EXPECT_THROW(graphs.run(second, stream, body), InvalidArgument) << "the other slot";
  EXPECT_THROW(graphs.run({.slot = first.slot}, stream, body), InvalidArgument) << "no bucket";
  graphs.run(first, stream, body);
  steps.commit();
  EXPECT_THROW(graphs.run(first, stream, body), InvalidState) << "it is over";
  device.finish_all();
  EXPECT_THAT(seen, ElementsAre(1, 2, 3));
}

TEST_F(GraphRunnerUnit, ClearForgetsGraphs) {
  GraphRunner graphs(steps, options());
  step(steps, number, graphs, 1, 2, stream);
  step(steps, number, graphs, 2, 2, stream);
  graphs.clear();
  step(steps, number, graphs, 3, 2, stream);
  EXPECT_EQ(num_bodies, 3);
  device.finish_all();
  EXPECT_THAT(seen, ElementsAre(1, 2, 3));
}

}  // namespace
}  // namespace mla
