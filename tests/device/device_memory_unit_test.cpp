#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "mla/device_memory.hpp"
#include "mla/error.hpp"
#include "mla/recording_device.hpp"

namespace mla {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using Bytes = std::vector<uint8_t>;

Bytes read(const DeviceMemory& memory, Stream stream = {}) {
  Bytes bytes(memory.bytes());
  memory.copy_to_host(bytes.data(), bytes.size(), stream);
  synchronize(memory.device(), stream);
  return bytes;
}

TEST(DeviceMemoryUnit, OnTheCpuItIsHostMemoryAndCopiesAreDoneAtOnce) {
  DeviceMemory memory({}, 4);
  EXPECT_EQ(memory.device(), Device{});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 64, 0U);
  memory.fill(7);
  const Bytes two = {1, 2};
  memory.copy_from_host(two.data(), 2, {}, 1);
  const auto* bytes = static_cast<const uint8_t*>(memory.data());
  EXPECT_THAT(Bytes(bytes, bytes + 4), ElementsAre(7, 1, 2, 7));
  uint8_t last = 0;
  memory.copy_to_host(&last, 1, {}, 2);
  EXPECT_EQ(last, 2);
}

TEST(DeviceMemoryUnit, ElsewhereCopiesAreQueuedInTheOrderOfTheirStream) {
  RecordingDevice device;
  {
    const DeviceStream stream(device.device());
    DeviceMemory memory(device.device(), 3);
    memory.fill(9, stream);
    const Bytes values = {4, 5};
    memory.copy_from_host(values.data(), 2, stream);
    Bytes back(3, 0);
    memory.copy_to_host(back.data(), 3, stream);
    EXPECT_THAT(back, Each(0)) << "queued only";
    stream.synchronize();
    EXPECT_THAT(back, ElementsAre(4, 5, 9));
  }
  EXPECT_THAT(device.violations(), IsEmpty());
}

TEST(DeviceMemoryUnit, StreamsAreApartAndEachCanBeWaitedFor) {
  RecordingDevice device;
  const DeviceStream one(device.device()), other(device.device());
  EXPECT_NE(one.get(), other.get());
  DeviceMemory first(device.device(), 1), second(device.device(), 1);
  first.fill(1, one);
  second.fill(1, other);
  const auto byte = [](const DeviceMemory& memory) {  // as the recording device lets the host
    return *static_cast<const uint8_t*>(memory.data());
  };
  *static_cast<uint8_t*>(first.data()) = *static_cast<uint8_t*>(second.data()) = 0;
  synchronize(device.device(), one);
  EXPECT_EQ(byte(first), 1);
  EXPECT_EQ(byte(second), 0);
  other.synchronize();
  EXPECT_EQ(byte(second), 1);
}

TEST(DeviceMemoryUnit, MovesHandOverTheMemory) {
  RecordingDevice device;
  DeviceMemory first(device.device(), 8);
  first.fill(3);
  void* const data = first.data();
  DeviceMemory second(std::move(first));
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): what a move leaves
  EXPECT_EQ(first.bytes(), 0U);
  first = DeviceMemory({}, 2);
  first = std::move(second);
  EXPECT_THAT(read(first), Each(3));
  DeviceStream stream(device.device());
  const Stream handle = stream;
  DeviceStream moved(std::move(stream));
  EXPECT_EQ(moved.get(), handle);
  stream = std::move(moved);
  EXPECT_EQ(stream.get(), handle);
}

TEST(DeviceMemoryUnit, CopiesPastTheEndAndOfNothingAreRefusedWithTheSizes) {
  DeviceMemory memory({}, 8);
  uint8_t bytes[16] = {};
  const auto refusal = [&](size_t count, size_t offset, void* host) -> std::string {
    try {
      memory.copy_to_host(host, count, {}, offset);
      memory.copy_from_host(host, count, {}, offset);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal(8, 0, bytes), "accepted");
  EXPECT_EQ(refusal(0, 8, nullptr), "accepted");
  EXPECT_THAT(refusal(8, 1, bytes), testing::AllOf(HasSubstr("within 8"), HasSubstr("8 at 1")));
  EXPECT_THAT(refusal(1, SIZE_MAX, bytes), HasSubstr("within 8"));
  EXPECT_THAT(refusal(1, 0, nullptr), HasSubstr("null"));
  EXPECT_THROW(DeviceMemory().copy_from_host(bytes, 1), InvalidArgument);
}

TEST(DeviceMemoryUnit, ADeviceThatIsNotThereIsRefusedByName) {
  const Device gone{DeviceKind::kRecording, 1 << 20};
  for (const auto& call : std::vector<std::pair<const char*, void (*)(Device)>>{
           {"DeviceMemory", [](Device device) { DeviceMemory(device, 1); }},
           {"DeviceStream", [](Device device) { DeviceStream{device}; }},
           {"synchronize", [](Device device) { synchronize(device); }}}) {
    try {
      call.second(gone);
      ADD_FAILURE() << call.first;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.parts().where, call.first);
      EXPECT_EQ(error.parts().got, "recording:1048576");
    }
  }
}

}  // namespace
}  // namespace mla
