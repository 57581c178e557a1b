#pragma once

#include <bit>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace mla {

/// Element types of tensors. The first three are what queries, caches and outputs may be.
enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt32 = 3, kInt64 = 4 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      break;
  }
  return 4;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat16:
      return "fp16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "unknown";
}

/// bfloat16: the upper half of an fp32. Conversion from fp32 rounds to nearest even; NaN stays NaN.
struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const auto word = std::bit_cast<uint32_t>(value);
    const bool is_nan = (word & 0x7fffffffU) > 0x7f800000U;
    const uint32_t rounded = word + 0x7fffU + ((word >> 16) & 1U);
    bits = static_cast<uint16_t>((is_nan ? (word | 0x00400000U) : rounded) >> 16);
  }
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

/// IEEE binary16. Conversion from fp32 rounds to nearest even, overflows to infinity, keeps
/// subnormals; NaN stays NaN.
struct Float16 {
  uint16_t bits = 0;

  Float16() = default;
  explicit Float16(float value) {
    const auto word = std::bit_cast<uint32_t>(value);
    const auto sign = static_cast<uint16_t>((word >> 16) & 0x8000U);
    const uint32_t magnitude = word & 0x7fffffffU;
    if (magnitude > 0x7f800000U) {  // NaN
      bits = static_cast<uint16_t>(sign | 0x7e00U);
    } else if (magnitude >= 0x477ff000U) {  // rounds to 65536 or above
      bits = static_cast<uint16_t>(sign | 0x7c00U);
    } else if (magnitude < 0x38800000U) {  // subnormal: let fp32 addition do the rounding
      const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
      bits = static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000U));
    } else {
      const uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U) - 0x38000000U;
      bits = static_cast<uint16_t>(sign | (rounded >> 13));
    }
  }
  explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
    const uint32_t magnitude = bits & 0x7fffU;
    if (magnitude >= 0x7c00U) {  // infinity and NaN
      return std::bit_cast<float>(sign | 0x7f800000U | ((magnitude & 0x3ffU) << 13));
    }
    if (magnitude < 0x0400U) {  // subnormal: magnitude * 2^-24
      const float value = static_cast<float>(magnitude) * 0x1p-24F;
      return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
    }
    return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000U));
  }
};

/// The DType of an element type; `void` has none of its own and a view of it carries one.
template <class T>
constexpr DType dtype_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, BFloat16>) return DType::kBFloat16;
  if constexpr (std::is_same_v<U, Float16>) return DType::kFloat16;
  if constexpr (std::is_same_v<U, int32_t>) return DType::kInt32;
  if constexpr (std::is_same_v<U, int64_t>) return DType::kInt64;
  return DType::kFloat32;
}

}  // namespace mla
