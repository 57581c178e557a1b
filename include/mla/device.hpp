#pragma once

#include <cstdint>
#include <string>

namespace mla {

/// kRecording is a pretend accelerator for tests, see recording_device.hpp.
enum class DeviceKind : uint8_t { kCpu = 0, kCuda = 1, kRecording = 2 };

/// Where memory lives and work runs.
struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int32_t index = 0;

  bool operator==(const Device&) const = default;
};

inline std::string to_string(Device device) {
  switch (device.kind) {
    case DeviceKind::kCpu:
      return "cpu";
    case DeviceKind::kCuda:
      return "cuda:" + std::to_string(device.index);
    case DeviceKind::kRecording:
      return "recording:" + std::to_string(device.index);
  }
  return "a device of unknown kind " + std::to_string(static_cast<int>(device.kind));
}

/// The queue that work is ordered on: a cudaStream_t on CUDA; the CPU ignores it, its calls return
/// when the work is done.
struct Stream {
  void* handle = nullptr;

  bool operator==(const Stream&) const = default;
};

}  // namespace mla
