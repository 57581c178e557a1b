#pragma once

#include <array>
#include <cstddef>

#include "device/owned_event.hpp"
#include "device/runtime.hpp"

namespace mla::device {

/// Gets a block of host data that is written again and again to one place on a device, without ever
/// touching bytes that a copy still reads: a ring of staging buffers, each with the event of its
/// last copy. On a device that does its work at once there is no ring, and the host writes to the
/// place itself.
///
/// Copies and the work that reads them may be on different streams; order_readers() and the write
/// itself keep them apart. Each stream must live until the next write.
class StagedBuffer {
 public:
  static constexpr int kDepth = 4;

  /// Allocates everything. `bytes` is the most that one write may have. Throws std::bad_alloc,
  /// CudaError.
  StagedBuffer(Runtime& runtime, size_t bytes);
  /// Waits for the copies in flight.
  ~StagedBuffer();
  StagedBuffer(const StagedBuffer&) = delete;
  StagedBuffer& operator=(const StagedBuffer&) = delete;

  /// The place on the device; its address never changes.
  std::byte* device_data() const { return device_; }

  /// Where the host may write next. Waits only when kDepth copies are in flight.
  /// Throws InvalidState when the stream is in a capture, or it is not that of the latest reader
  /// and that is.
  std::byte* begin_write(Stream stream);
  /// Copies the first `bytes` of it, behind everything that read the previous contents.
  void end_write(size_t bytes, Stream stream);

  /// To be called before work that reads the contents is queued on the stream. Costs nothing where
  /// the stream is that of the last write. Inside a capture it does nothing: who replays the graph
  /// calls it for the stream of the replay. Throws InvalidState as begin_write, of another stream's
  /// capture.
  void order_readers(Stream stream);

 private:
  struct Slot {
    std::byte* memory = nullptr;
    OwnedEvent copied;
  };

  explicit StagedBuffer(Runtime& runtime) : runtime_(runtime) {}
  void require_reader_outside_a_capture(Stream stream, const char* where) const;

  Runtime& runtime_;
  std::byte* device_ = nullptr;
  std::array<Slot, kDepth> ring_{};
  int next_ = 0;   // slot of the next write
  int last_ = -1;  // slot of the last write
  Stream written_on_{};
  Stream read_on_{};  // the last stream that was ordered behind the write
  bool has_reader_ = false;
  OwnedEvent read_;
};

}  // namespace mla::device
