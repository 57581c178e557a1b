#pragma once

#include <string>

#include "device/runtimes.hpp"
#include "mla/device.hpp"

namespace mla::test {

inline constexpr Device kCuda{.kind = DeviceKind::kCuda, .index = 0};

/// Why the tests of a CUDA device are skipped; empty where there is one.
inline std::string missing_cuda() {
  std::string reason;
  return device::find_cuda_runtime(kCuda.index, reason) != nullptr ? "" : reason;
}

}  // namespace mla::test
