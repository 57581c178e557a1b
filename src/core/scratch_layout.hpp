#pragma once

#include <cstddef>

namespace mla {

/// Books places in one block of scratch, each on a cache line of its own. Who sizes the block and
/// who takes from it make the same bookings, so that the size is exact.
class ScratchLayout {
 public:
  static constexpr size_t kAlignment = 64;

  /// Books from `first` on, which must be aligned.
  explicit ScratchLayout(size_t first = 0) : bytes_(first) {}

  /// Offset of `count` elements of T.
  template <class T>
  size_t book(size_t count) {
    const size_t at = bytes_;
    bytes_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
};

}  // namespace mla
