#pragma once

#include <cstdint>

#include "device/runtime.hpp"

namespace mla::device {

Runtime& cpu_runtime();
/// Null where no RecordingDevice of that index lives.
Runtime* find_recording_runtime(int32_t index);

}  // namespace mla::device
