#include "device/runtimes.hpp"

#include "mla/error.hpp"

namespace mla::device {

Runtime& runtime_of(Device device, const char* what, const char* where) {
  std::string cuda_reason;  // stays empty, and takes no memory, where there is a runtime
  switch (device.kind) {
    case DeviceKind::kCpu:
      if (device.index == 0) return cpu_runtime();
      break;
    case DeviceKind::kRecording:
      if (Runtime* runtime = find_recording_runtime(device.index)) return *runtime;
      break;
    case DeviceKind::kCuda:
      if (Runtime* runtime = find_cuda_runtime(device.index, cuda_reason)) return *runtime;
      break;
  }
  throw_invalid({.what = what,
                 .where = where,
                 .expected = cuda_reason.empty() ? "cpu, or a recording device that lives"
                                                 : std::move(cuda_reason),
                 .got = to_string(device)});
}

}  // namespace mla::device
