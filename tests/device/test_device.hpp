#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "mla/device_memory.hpp"
#include "mla/tensor_view.hpp"

// Tests that ask nothing of a device but that it is one: they run on any.
namespace mla::test {

/// The device that this program's tests run on: what MLA_TEST_DEVICE names, cpu or cuda; the CPU
/// where it is not set. Where it is not there, every test of the program is skipped with the
/// reason. Throws InvalidArgument for another name.
Device test_device();

/// The first GPU.
inline constexpr Device kCuda{DeviceKind::kCuda, 0};

/// Why there is no such device; empty where there is.
std::string missing(Device device);

/// The kernel that the tests of engines take: the reference where it runs.
inline std::string test_kernel(Device device) {
  return device.kind == DeviceKind::kCuda ? "" : "reference";
}

/// Values on a device beside their copy on the host, `host`. Both copies are queued: the host's
/// must be left alone until the stream has passed them.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(Device device, std::vector<T> values = {}, Stream stream = {})
      : device_(device) {
    assign(std::move(values), stream);
  }

  std::vector<T> host;

  /// Other values, and as many of them; the address stays where they are not more than ever before.
  void assign(std::vector<T> values, Stream stream = {}) {
    host = std::move(values);
    if (memory_.bytes() < bytes()) memory_ = DeviceMemory(device_, bytes());
    upload(stream);
  }
  void upload(Stream stream = {}) { memory_.copy_from_host(host.data(), bytes(), stream); }
  void download(Stream stream = {}) { memory_.copy_to_host(host.data(), bytes(), stream); }
  /// Downloads and waits for the stream.
  const std::vector<T>& read(Stream stream = {}) {
    download(stream);
    synchronize(device_, stream);
    return host;
  }

  T* data() const { return static_cast<T*>(memory_.data()); }
  template <size_t Rank>
  TensorView<T, static_cast<int>(Rank)> view(const std::array<int64_t, Rank>& shape) const {
    return contiguous_view(data(), shape, device_);
  }

 private:
  size_t bytes() const { return host.size() * sizeof(T); }

  Device device_;
  DeviceMemory memory_;
};

/// The values of a device tensor [n] without gaps, once the stream has got there.
std::vector<int32_t> read_back(const TensorView<const int32_t, 1>& tensor, Stream stream = {});
std::vector<int64_t> read_back(const TensorView<const int64_t, 1>& tensor, Stream stream = {});

}  // namespace mla::test
