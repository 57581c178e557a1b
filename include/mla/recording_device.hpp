#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mla/device.hpp"
#include "mla/export.hpp"

namespace mla {

/// A pretend accelerator, to test an engine's use of streams and graphs on a machine without one.
/// Its memory is host memory and its kernels are the CPU's, but work is queued: it is done when a
/// stream is finished, in the order of the stream, and after the events that it waits for. A
/// capture keeps the calls, a replay queues them again.
///
/// It keeps a list of what an engine or the library did wrong:
///   - a staging buffer was written before the copy that reads it was done
///   - memory was allocated or released, or the host waited, inside a capture
///   - memory that a live graph uses was released
/// Not thread-safe: one thread drives a device at a time.
class MLA_API RecordingDevice {
 public:
  RecordingDevice();
  ~RecordingDevice();
  RecordingDevice(const RecordingDevice&) = delete;
  RecordingDevice& operator=(const RecordingDevice&) = delete;

  Device device() const noexcept;
  /// A new stream; the default stream Stream{} is there too.
  Stream create_stream();

  /// Does everything that is queued on the stream, and on others as far as it waits for them.
  void finish(Stream stream);
  /// Does everything. Streams take turns in an order drawn from the seed.
  void finish_all(uint64_t seed = 0);

  /// Calls since the beginning, in the order in which they were queued: "copy 512 B",
  /// "attention", "begin capture", "replay", "host wait", "allocate 64 B", ...
  const std::vector<std::string>& calls() const noexcept;
  const std::vector<std::string>& violations() const noexcept;
  int64_t num_allocations() const noexcept;
  int64_t num_host_waits() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla
