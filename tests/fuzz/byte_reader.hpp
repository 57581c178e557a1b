#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>

namespace mla::fuzz {

/// Turns a fuzzer's bytes into numbers; zeros once they are used up.
class ByteReader {
 public:
  explicit ByteReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  bool empty() const { return bytes_.empty(); }

  uint8_t byte() {
    if (bytes_.empty()) return 0;
    const uint8_t first = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return first;
  }

  /// low .. high, at most 256 apart, from one byte.
  int32_t within(int32_t low, int32_t high) { return low + byte() % (high - low + 1); }

  int32_t word() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value = value << 8 | byte();
    return static_cast<int32_t>(value);
  }

 private:
  std::span<const uint8_t> bytes_;
};

/// Ends the process with a message, which the fuzzer reports with its input.
[[noreturn]] inline void fail(const std::string& message) {
  std::fprintf(stderr, "fault: %s\n", message.c_str());
  std::abort();
}

}  // namespace mla::fuzz
