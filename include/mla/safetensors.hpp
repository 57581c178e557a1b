#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/dtype.hpp"
#include "mla/export.hpp"
#include "mla/tensor_view.hpp"

namespace mla {

/// One tensor of a safetensors file: row-major, little-endian.
struct SafetensorsEntry {
  std::string name;
  std::string dtype_name;      ///< as the file spells it: "BF16"
  std::optional<DType> dtype;  ///< where this library has the type
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  ///< of any alignment
};

/// A safetensors file, read strictly: a file is refused unless its header is one JSON object
/// without repeated names, every tensor has a known dtype and exactly the bytes that its shape
/// needs, and the tensors cover the data without gaps or overlaps. Nothing outside the file is ever
/// read. Objects may be read from several threads at once.
class MLA_API Safetensors {
 public:
  /// Maps a file; it must not be cut short while the object lives. Throws InvalidArgument (cannot
  /// be opened or read, or malformed: the message says where).
  explicit Safetensors(const std::string& path);
  /// Reads bytes that somebody else keeps alive. `name` stands for the path in messages.
  Safetensors(std::span<const std::byte> bytes, std::string name);
  ~Safetensors();
  Safetensors(Safetensors&&) noexcept;
  Safetensors& operator=(Safetensors&&) noexcept;

  const std::string& name() const noexcept { return name_; }
  /// In the order of their data.
  const std::vector<SafetensorsEntry>& entries() const noexcept { return entries_; }
  /// Null where the file has no such tensor.
  const SafetensorsEntry* find(std::string_view tensor) const noexcept;
  /// Throws InvalidArgument where the file has no such tensor.
  const SafetensorsEntry& at(std::string_view tensor) const;
  /// The header's `__metadata__`; empty where it has none.
  const std::map<std::string, std::string, std::less<>>& metadata() const noexcept {
    return metadata_;
  }

  /// A tensor of one or two dimensions as rows: [n] is [1, n]. The view lives as long as the object
  /// and may be unaligned. Throws InvalidArgument (no such tensor, more dimensions, a dtype other
  /// than fp32, bf16 and fp16).
  ConstTensor<2> matrix(std::string_view tensor) const;

 private:
  void parse(std::span<const std::byte> bytes);

  struct Mapping;
  std::unique_ptr<Mapping> mapping_;
  std::string name_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

}  // namespace mla
