#pragma once

#include <cstddef>
#include <cstdint>

#include "cases/attention_case.hpp"
#include "mla/dtype.hpp"

namespace mla::cases {

/// Host memory with guards on both sides. Up to 256 MiB it is heap memory with 64 guard bytes on
/// either side; above it is mapped without being reserved, so that only what is touched takes
/// room, between two pages that cannot be touched.
class Buffer {
 public:
  Buffer() = default;
  /// `offset` bytes are left free at the (64-byte aligned) start. Throws std::bad_alloc.
  explicit Buffer(size_t bytes, size_t offset = 0);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  std::byte* data() const { return data_; }
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
};

/// Fills `count` elements: zero, a NaN or +infinity.
void fill_poison(Poison poison, DType dtype, void* out, int64_t count);

}  // namespace mla::cases
