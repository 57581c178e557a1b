#pragma once

#include <cstdint>
#include <string>

#include "device/runtime.hpp"

namespace mla::device {

Runtime& cpu_runtime();
/// Null where no RecordingDevice of that index lives.
Runtime* find_recording_runtime(int32_t index);
/// Null, and what there is instead, where the build or the machine has no such device.
Runtime* find_cuda_runtime(int32_t index, std::string& reason);

}  // namespace mla::device
