#pragma once

#include <cstdint>
#include <string>

namespace mla {

enum class DeviceKind : uint8_t { kCpu = 0, kCuda = 1 };

/// Where memory lives and work runs.
struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int32_t index = 0;

  bool operator==(const Device&) const = default;
};

inline std::string to_string(Device device) {
  return device.kind == DeviceKind::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

/// The queue that work is ordered on: a cudaStream_t on CUDA; the CPU ignores it, its calls return
/// when the work is done.
struct Stream {
  void* handle = nullptr;
};

}  // namespace mla
