#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "device/runtime.hpp"
#include "mla/error.hpp"
#include "mla/recording_device.hpp"

// The pretend accelerator must catch each fault that it claims to catch.
namespace mla {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

struct Recording : testing::Test {
  RecordingDevice device;
  device::Runtime& runtime = device::runtime_of(device.device());
};
using RecordingDeviceUnit = Recording;

TEST_F(RecordingDeviceUnit, WorkWaitsUntilItsStreamIsFinished) {
  std::vector<int> done;
  const Stream a = device.create_stream();
  const Stream b = device.create_stream();
  runtime.submit(a, "first", [&] { done.push_back(1); });
  runtime.submit(b, "other", [&] { done.push_back(2); });
  runtime.submit(a, "second", [&] { done.push_back(3); });
  EXPECT_THAT(done, IsEmpty());
  device.finish(a);
  EXPECT_THAT(done, ElementsAre(1, 3));
  device.finish_all();
  EXPECT_THAT(done, ElementsAre(1, 3, 2));
  EXPECT_THAT(device.calls(), ElementsAre("first", "other", "second"));
}

TEST_F(RecordingDeviceUnit, EventsOrderStreams) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<int> done;
    const Stream a = device.create_stream();
    const Stream b = device.create_stream();
    const device::Event event = runtime.create_event();
    runtime.submit(a, "producer", [&] { done.push_back(1); });
    runtime.record(event, a);
    EXPECT_FALSE(runtime.is_reached(event));
    runtime.wait_on_stream(b, event);
    runtime.submit(b, "consumer", [&] { done.push_back(2); });
    device.finish_all(seed);
    EXPECT_THAT(done, ElementsAre(1, 2));
    EXPECT_TRUE(runtime.is_reached(event));
  }
}

TEST_F(RecordingDeviceUnit, GraphKeepsCallsAndReplaysThem) {
  int count = 0;
  runtime.begin_capture({});
  EXPECT_TRUE(runtime.is_capturing({}));
  runtime.submit({}, "work", [&] { ++count; });
  const device::Graph graph = runtime.end_capture({});
  device.finish_all();
  EXPECT_EQ(count, 0);
  for (int replay = 0; replay < 3; ++replay) runtime.replay(graph, {});
  device.finish_all();
  EXPECT_EQ(count, 3);
  runtime.destroy_graph(graph);
}

TEST_F(RecordingDeviceUnit, CatchesAStagingBufferWrittenTooEarly) {
  int staging = 1;
  int target = 0;
  runtime.copy_to_device(&target, &staging, sizeof(int), {});
  device.finish_all();
  EXPECT_THAT(device.violations(), IsEmpty());
  runtime.copy_to_device(&target, &staging, sizeof(int), {});
  staging = 2;
  device.finish_all();
  EXPECT_THAT(device.violations(), ElementsAre(HasSubstr("before its copy was done")));
}

TEST_F(RecordingDeviceUnit, CatchesAllocationAndWaitingInsideACapture) {
  void* before = runtime.allocate(64);
  runtime.begin_capture({});
  void* inside = runtime.allocate(64);
  runtime.synchronize({});
  const device::Graph graph = runtime.end_capture({});
  EXPECT_THAT(device.violations(), ElementsAre(HasSubstr("allocated"), HasSubstr("waited")));
  runtime.release(before);
  EXPECT_THAT(device.violations().back(), HasSubstr("live graph"));
  runtime.destroy_graph(graph);
  const size_t found = device.violations().size();
  runtime.release(inside);
  EXPECT_EQ(device.violations().size(), found);
}

TEST(RecordingDeviceLife, DeviceIsGoneAfterItsObject) {
  Device device;
  {
    const RecordingDevice recording;
    device = recording.device();
    EXPECT_NO_THROW(device::runtime_of(device));
  }
  EXPECT_THROW(device::runtime_of(device), InvalidArgument);
}

}  // namespace
}  // namespace mla
