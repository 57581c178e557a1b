#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/test_device.hpp"
#include "mla/recording_device.hpp"

namespace mla::test {

/// A device that queues its work and has graphs: the GPU where the tests run on one, else the
/// recording device.
class GraphDevice {
 public:
  GraphDevice() {
    if (test_device().kind != DeviceKind::kCuda) recording_ = std::make_unique<RecordingDevice>();
  }

  Device device() const { return recording_ ? recording_->device() : test_device(); }
  /// Null on the GPU.
  const RecordingDevice* recording() const { return recording_.get(); }
  /// Lives as long as the device.
  Stream create_stream() { return streams_.emplace_back(device()); }
  /// Waits for everything. The recording device does it now, streams in an order drawn from the
  /// seed.
  void finish_all(uint64_t seed = 0) {
    if (recording_) return recording_->finish_all(seed);
    for (const DeviceStream& stream : streams_) stream.synchronize();
    synchronize(device());
  }
  /// What the recording device saw go wrong.
  std::vector<std::string> violations() const {
    return recording_ ? recording_->violations() : std::vector<std::string>{};
  }

 private:
  std::unique_ptr<RecordingDevice> recording_;
  std::vector<DeviceStream> streams_;
};

}  // namespace mla::test
