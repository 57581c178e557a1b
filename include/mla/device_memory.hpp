#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "mla/device.hpp"
#include "mla/export.hpp"

namespace mla {

namespace device {
class Runtime;
}

/// Memory of a device, owned: what an engine that brings no allocator of its own puts tensors into.
///
///   DeviceMemory q(device, num_bytes);
///   q.copy_from_host(values.data(), num_bytes, stream);
///   contiguous_view(q.data(), shape, DType::kBFloat16, device)
///
/// Copies and fills are queued on the stream. On the CPU, whose memory this is, they are done when
/// the call returns; elsewhere the host memory must be left alone until the stream has passed the
/// copy (synchronize). Host memory may be of any kind: copies of pageable memory make the driver
/// stage them, for which the host may have to wait. A copy inside a capture reads or writes the
/// host memory at each replay.
///
/// The work that uses the memory must be done before the object is destroyed, and a
/// RecordingDevice must outlive it. May be moved; a moved-from object is empty.
class MLA_API DeviceMemory {
 public:
  /// Nothing, on the CPU.
  DeviceMemory() = default;
  /// Contents are undefined; 64-byte aligned. May wait for the device. Not inside a capture.
  /// Throws std::bad_alloc, InvalidArgument (a device that is not there), CudaError.
  DeviceMemory(Device device, size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    DeviceMemory(std::move(other)).swap(*this);
    return *this;
  }

  Device device() const noexcept { return device_; }
  size_t bytes() const noexcept { return bytes_; }
  /// On the device: the host may follow it on the CPU only.
  void* data() const noexcept { return data_; }

  /// Copies `bytes` from or to the host, at `offset` bytes into this memory. 0 bytes do nothing.
  /// Throws InvalidArgument (beyond the end, null), CudaError.
  void copy_from_host(const void* from, size_t bytes, Stream stream = {}, size_t offset = 0);
  void copy_to_host(void* to, size_t bytes, Stream stream = {}, size_t offset = 0) const;
  /// Sets every byte.
  void fill(uint8_t value, Stream stream = {});

 private:
  void swap(DeviceMemory& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(runtime_, other.runtime_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void check(const char* where, const void* host, size_t bytes, size_t offset) const;

  Device device_{};
  device::Runtime* runtime_ = nullptr;  // null: empty
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

/// A stream of a device, owned. On the CPU there is but the one, Stream{}; on CUDA it does not wait
/// for the default stream. Destroying it waits for its work. May be moved.
class MLA_API DeviceStream {
 public:
  /// Throws InvalidArgument (a device that is not there), CudaError.
  explicit DeviceStream(Device device = {});
  ~DeviceStream();
  DeviceStream(DeviceStream&& other) noexcept
      : runtime_(std::exchange(other.runtime_, nullptr)), stream_(other.stream_) {}
  DeviceStream& operator=(DeviceStream&& other) noexcept {
    std::swap(runtime_, other.runtime_);
    std::swap(stream_, other.stream_);
    return *this;
  }

  Stream get() const noexcept { return stream_; }
  operator Stream() const noexcept { return stream_; }  // NOLINT(google-explicit-constructor)
  /// Blocks until all that is queued on it is done. Throws CudaError, also of that work.
  void synchronize() const;

 private:
  device::Runtime* runtime_ = nullptr;  // null: moved from
  Stream stream_{};
};

/// Blocks until all that is queued on the device's stream is done; returns at once on the CPU.
/// Throws InvalidArgument (a device that is not there), CudaError, also of that work.
MLA_API void synchronize(Device device, Stream stream = {});

}  // namespace mla
