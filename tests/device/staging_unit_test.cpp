#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "device/host_runtime.hpp"
#include "device/staging.hpp"
#include "mla/error.hpp"
#include "mla/recording_device.hpp"

namespace mla::device {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

struct Staging : testing::Test {
  RecordingDevice device;
  Runtime& runtime = runtime_of(device.device());
  StagedBuffer buffer{runtime, sizeof(int)};
  std::vector<int> seen;

  void write(int value, Stream stream) {
    std::memcpy(buffer.begin_write(stream), &value, sizeof(value));
    buffer.end_write(sizeof(value), stream);
  }
  void read(Stream stream) {
    buffer.order_readers(stream);
    runtime.submit(stream, "read", [this] {
      int value = 0;
      std::memcpy(&value, buffer.device_data(), sizeof(value));
      seen.push_back(value);
    });
  }
};
using StagingUnit = Staging;

// The race of mstar PR 243, rtp-llm PR 1254, vllm PR 32799: the host is ahead of the device.
TEST_F(StagingUnit, LaterWritesDoNotReachEarlierReaders) {
  const Stream stream = device.create_stream();
  for (int value = 1; value <= StagedBuffer::kDepth; ++value) {
    write(value, stream);
    read(stream);
  }
  EXPECT_EQ(device.num_host_waits(), 0) << "the ring is deep enough for these";
  device.finish_all();
  EXPECT_THAT(seen, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(device.violations(), IsEmpty());
}

TEST_F(StagingUnit, WaitsOnlyWhenTheRingIsFull) {
  const Stream stream = device.create_stream();
  for (int value = 0; value < StagedBuffer::kDepth; ++value) write(value, stream);
  EXPECT_EQ(device.num_host_waits(), 0);
  write(99, stream);
  EXPECT_EQ(device.num_host_waits(), 1);
  device.finish_all();
  EXPECT_THAT(device.violations(), IsEmpty());
}

TEST_F(StagingUnit, WritersAndReadersOnAnyStreamsKeepTheirOrder) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const std::array streams = {device.create_stream(), device.create_stream(),
                                device.create_stream()};
    seen.clear();
    std::vector<int> expected;
    for (int value = 0; value < 40; ++value) {
      write(value, streams[random() % streams.size()]);
      for (uint64_t i = random() % 3; i > 0; --i) {
        read(streams[random() % streams.size()]);
        expected.push_back(value);
      }
    }
    device.finish_all(seed);
    ASSERT_EQ(seen, expected) << "seed " << seed;
    ASSERT_THAT(device.violations(), IsEmpty());
  }
}

TEST_F(StagingUnit, WriteInsideACaptureIsRefused) {
  runtime.begin_capture({});
  EXPECT_THROW(buffer.begin_write({}), InvalidState);
  runtime.destroy_graph(runtime.end_capture({}));
}

TEST_F(StagingUnit, AReaderInACaptureKeepsOtherStreamsOut) {
  const Stream planning = device.create_stream(), running = device.create_stream();
  write(1, planning);
  read(running);
  runtime.begin_capture(running);
  // An event of that stream belongs to the capture: who waits for it would be captured too.
  EXPECT_THROW(buffer.begin_write(planning), InvalidState);
  EXPECT_THROW(buffer.order_readers(planning), InvalidState);
  runtime.destroy_graph(runtime.end_capture(running));
  write(2, planning);
  read(planning);
  device.finish_all();
  EXPECT_THAT(seen, ElementsAre(1, 2));
}

TEST(StagingMemory, IsGivenBackWhereALaterPartIsNotToBeHad) {
  test::HostRuntime runtime;
  int64_t num_parts = 0;
  {
    const StagedBuffer whole(runtime, 64);
    num_parts = runtime.num_held;
  }
  ASSERT_EQ(num_parts, 2 + 2 * StagedBuffer::kDepth);
  EXPECT_EQ(runtime.num_held, 0);
  for (int64_t part = 0; part < num_parts; ++part) {
    runtime.num_left = part;
    EXPECT_ANY_THROW(StagedBuffer(runtime, 64)) << part;
    EXPECT_EQ(runtime.num_held, 0) << part;
  }
}

TEST(StagingMemory, IsGivenBackByADeviceThatFails) {
  test::HostRuntime runtime;
  {
    StagedBuffer buffer(runtime, 64);
    buffer.begin_write({});
    buffer.end_write(64, {});
    runtime.waits_fail = true;
  }  // whose destructor must not throw
  EXPECT_EQ(runtime.num_held, 0);
}

TEST(StagingOnTheCpu, WritesTheDevicesPlaceItself) {
  StagedBuffer buffer(runtime_of({}), 64);
  EXPECT_EQ(buffer.begin_write({}), buffer.device_data());
}

}  // namespace
}  // namespace mla::device
