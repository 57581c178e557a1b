#pragma once

#include <cstddef>
#include <cstdint>

#include "cases/attention_case.hpp"
#include "mla/dtype.hpp"

namespace mla::device {
class Runtime;
}  // namespace mla::device

namespace mla::cases {

/// Host memory with guards on both sides, and a copy of it, guards included, on a device; on the
/// CPU the two are one. Up to 256 MiB it is heap memory with 64 guard bytes on either side; above
/// it is mapped without being reserved, so that only what is touched takes room, between two pages
/// that cannot be touched. A sparse buffer's copy on a device is full of NaN
/// where the host never wrote.
class Buffer {
 public:
  Buffer() = default;
  /// `offset` bytes are left free at the (64-byte aligned) start. Throws std::bad_alloc, and
  /// InvalidArgument where the device is not there.
  explicit Buffer(size_t bytes, size_t offset = 0, Device device = {});
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  std::byte* data() const { return data_; }
  /// Where data() is on the device.
  std::byte* device_data() const { return device_data_; }
  /// Copies what the host touched to the device; all of it but for sparse memory. Blocks.
  void upload() const;
  /// Copies everything back once all streams have ended; nothing for sparse memory. Blocks.
  void download() const;
  /// The same for `bytes` bytes from `offset` on, sparse or not.
  void download(size_t offset, size_t bytes) const;
  size_t size() const { return size_; }
  bool is_sparse() const { return mapped_ > 0; }
  /// Nobody wrote around the memory.
  bool guards_intact() const;
  /// A number that changes, but for one chance in 2^64, when any byte does. 0 for sparse memory.
  uint64_t fingerprint() const;

 private:
  std::byte* block_ = nullptr;
  size_t mapped_ = 0;  ///< bytes of a mapping, 0 for heap memory
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t block_bytes_ = 0;  ///< from the first byte that may be touched
  device::Runtime* runtime_ = nullptr;
  std::byte* device_block_ = nullptr;  ///< null on the CPU
  std::byte* device_data_ = nullptr;

  std::byte* first_byte() const;
};

/// Fills `count` elements: zero, a NaN or +infinity.
void fill_poison(Poison poison, DType dtype, void* out, int64_t count);

}  // namespace mla::cases
