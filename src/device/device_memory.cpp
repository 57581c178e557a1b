#include "mla/device_memory.hpp"

#include <string>

#include "device/runtime.hpp"
#include "mla/error.hpp"

namespace mla {

DeviceMemory::DeviceMemory(Device device, size_t bytes)
    : device_(device),
      runtime_(&device::runtime_of(device, "device", "DeviceMemory")),
      data_(runtime_->allocate(bytes)),
      bytes_(bytes) {}

DeviceMemory::~DeviceMemory() {
  if (runtime_ != nullptr) runtime_->release(data_);
}

void DeviceMemory::check(const char* where, const void* host, size_t bytes, size_t offset) const {
  if (offset > bytes_ || bytes > bytes_ - offset) {
    throw_invalid({.what = "bytes",
                   .where = where,
                   .expected = "within " + std::to_string(bytes_),
                   .got = std::to_string(bytes) + " at " + std::to_string(offset)});
  }
  if (bytes > 0 && host == nullptr) {
    throw_invalid({.what = "host memory", .where = where, .expected = "an address", .got = "null"});
  }
}

void DeviceMemory::copy_from_host(const void* from, size_t bytes, Stream stream, size_t offset) {
  check("DeviceMemory::copy_from_host", from, bytes, offset);
  if (bytes == 0) return;
  runtime_->copy_to_device(static_cast<std::byte*>(data_) + offset, from, bytes, stream);
}

void DeviceMemory::copy_to_host(void* to, size_t bytes, Stream stream, size_t offset) const {
  check("DeviceMemory::copy_to_host", to, bytes, offset);
  if (bytes == 0) return;
  runtime_->copy_to_host(to, static_cast<const std::byte*>(data_) + offset, bytes, stream);
}

void DeviceMemory::fill(uint8_t value, Stream stream) {
  if (bytes_ > 0) runtime_->fill(data_, value, bytes_, stream);
}

DeviceStream::DeviceStream(Device device)
    : runtime_(&device::runtime_of(device, "device", "DeviceStream")),
      stream_(runtime_->create_stream()) {}

DeviceStream::~DeviceStream() {
  if (runtime_ != nullptr) runtime_->destroy_stream(stream_);
}

void DeviceStream::synchronize() const { runtime_->synchronize(stream_); }

void synchronize(Device device, Stream stream) {
  device::runtime_of(device, "device", "synchronize").synchronize(stream);
}

}  // namespace mla
