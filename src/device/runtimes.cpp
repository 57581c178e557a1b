#include "device/runtimes.hpp"

#include "mla/error.hpp"

namespace mla::device {

Runtime* find_runtime(Device device, std::string& instead) {
  switch (device.kind) {
    case DeviceKind::kCpu:
      if (device.index == 0) return &cpu_runtime();
      break;
    case DeviceKind::kRecording:
      if (Runtime* runtime = find_recording_runtime(device.index)) return runtime;
      break;
    case DeviceKind::kCuda:
      return find_cuda_runtime(device.index, instead);
  }
  instead = "cpu, or a recording device that lives";
  return nullptr;
}

Runtime& runtime_of(Device device, const char* what, const char* where) {
  std::string instead;
  if (Runtime* runtime = find_runtime(device, instead)) return *runtime;
  throw_invalid(
      {.what = what, .where = where, .expected = std::move(instead), .got = to_string(device)});
}

}  // namespace mla::device
