#pragma once

#include <cstring>
#include <type_traits>

#include "mla/dtype.hpp"
#include "mla/tensor_view.hpp"

// Loops over the rows of host tensors, whose elements may lie at any address.
namespace mla::layer {

template <class T>
float load(const void* base, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(base) + index * int64_t{sizeof(T)}, sizeof(T));
  return static_cast<float>(value);
}

template <class T>
void store(void* base, int64_t index, float value) {
  const T narrow(value);
  std::memcpy(static_cast<std::byte*>(base) + index * int64_t{sizeof(T)}, &narrow, sizeof(T));
}

/// Calls fn with a value of the element type: float, BFloat16 or Float16.
template <class Fn>
void with_type(DType dtype, const Fn& fn) {
  if (dtype == DType::kBFloat16) {
    fn(BFloat16{});
  } else if (dtype == DType::kFloat16) {
    fn(Float16{});
  } else {
    fn(float{});
  }
}

/// to[i, j] = from[i, j], rounded to nearest even where `to` is narrower. Columns contiguous or at
/// from.stride[1].
inline void convert_rows(const ConstTensor<2>& from, const Tensor<2>& to) {
  with_type(from.dtype, [&](auto from_type) {
    with_type(to.dtype, [&](auto to_type) {
      for (int64_t i = 0; i < to.shape[0]; ++i) {
        for (int64_t j = 0; j < to.shape[1]; ++j) {
          const float value =
              load<decltype(from_type)>(from.data, i * from.stride[0] + j * from.stride[1]);
          store<decltype(to_type)>(to.data, i * to.stride[0] + j * to.stride[1], value);
        }
      }
    });
  });
}

}  // namespace mla::layer
