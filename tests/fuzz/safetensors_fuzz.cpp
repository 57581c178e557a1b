// Any bytes are refused or read right: what is accepted lies within the file, each tensor has the
// bytes that its shape needs, and together they are all of the data.
#include <cstdint>
#include <span>

#include "fuzz/byte_reader.hpp"
#include "mla/error.hpp"
#include "mla/safetensors.hpp"

namespace {

void check(const mla::Safetensors& file, std::span<const std::byte> bytes) {
  const std::byte* covered = nullptr;
  size_t sum = 0;
  for (const mla::SafetensorsEntry& entry : file.entries()) {
    if (covered != nullptr && entry.bytes.data() != covered) mla::fuzz::fail("a gap");
    covered = entry.bytes.data() + entry.bytes.size();
    for (const std::byte byte : entry.bytes) sum += static_cast<size_t>(byte);  // all readable
    if (&file.at(entry.name) != &entry) mla::fuzz::fail("a name comes twice");
    try {
      const auto matrix = file.matrix(entry.name);
      const int64_t size = matrix.shape[0] * matrix.shape[1] * mla::size_of(matrix.dtype);
      if (size != std::ssize(entry.bytes)) mla::fuzz::fail("a matrix of another size");
    } catch (const mla::InvalidArgument&) {  // other dtypes and dimensions
    }
  }
  if (covered != nullptr && covered != bytes.data() + bytes.size()) mla::fuzz::fail("data left");
  if (sum > 255 * bytes.size()) mla::fuzz::fail("more bytes than there are");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data,
                                      size_t size) {  // NOLINT: libFuzzer's name
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  try {
    check(mla::Safetensors(bytes, "input"), bytes);
  } catch (const mla::InvalidArgument&) {
  }
  return 0;
}
