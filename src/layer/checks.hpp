#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "mla/error.hpp"
#include "mla/tensor_view.hpp"

// Checks of the tensors that a layer is given.
namespace mla::layer {

[[noreturn]] inline void refuse(const char* where, const std::string& what,
                                const std::string& expected, const std::string& got) {
  throw_invalid({.what = what, .where = where, .expected = expected, .got = got});
}

/// Rows with contiguous columns on `device`; elements at any address on the CPU, aligned elsewhere.
/// `wanted` lists the dtypes that will do.
template <class T, int Rank>
void check_rows(const char* where, const char* what, const TensorView<T, Rank>& tensor,
                const std::array<int64_t, Rank>& shape, std::initializer_list<DType> wanted,
                Device device) {
  constexpr int64_t kMostBytes = int64_t{1} << 61;  // that one tensor may span
  const std::string name = what;
  if (tensor.shape != shape) {
    refuse(where, name + ".shape", to_string(shape), to_string(tensor.shape));
  }
  if (tensor.device != device) {
    refuse(where, name + ".device", to_string(device), to_string(tensor.device));
  }
  if (std::ranges::find(wanted, tensor.dtype) == wanted.end()) {
    std::string names;
    for (const DType dtype : wanted) {
      names += (names.empty() ? "" : " or ") + std::string(name_of(dtype));
    }
    refuse(where, name + ".dtype", names, std::string(name_of(tensor.dtype)));
  }
  if (tensor.empty()) return;
  if (tensor.data == nullptr) refuse(where, name + ".data", "memory", "null");
  const auto item = static_cast<uintptr_t>(size_of(tensor.dtype));
  if (device.kind != DeviceKind::kCpu && reinterpret_cast<uintptr_t>(tensor.data) % item != 0) {
    refuse(where, name + ".data", "an address aligned to its elements", "another");
  }
  if (shape[Rank - 1] > 1 && tensor.stride[Rank - 1] != 1) {
    refuse(where, name + ".stride[" + std::to_string(Rank - 1) + "]", "1",
           std::to_string(tensor.stride[Rank - 1]));
  }
  for (size_t d = 0; d + 1 < Rank; ++d) {
    if (shape[d] > 1 && tensor.stride[d] < shape[Rank - 1]) {
      refuse(where, name + ".stride[" + std::to_string(d) + "]",
             "at least " + std::to_string(shape[Rank - 1]) + ", the row's width",
             std::to_string(tensor.stride[d]));
    }
    int64_t bytes = 0;  // of the dimension; three of them then stay below 2^63
    if (__builtin_mul_overflow(shape[d] * 4, tensor.stride[d], &bytes) || bytes > kMostBytes) {
      refuse(where, name + ".stride[" + std::to_string(d) + "]", "a tensor within 2^61 bytes",
             std::to_string(tensor.stride[d]));
    }
  }
}

/// One number for each token, without gaps, on `device`. Entries are looked at on the CPU only.
template <class T, class Accepts>
void check_list(const char* where, const char* what, const TensorView<T, 1>& list,
                int64_t num_tokens, Device device, const std::string& expected,
                const Accepts& accepts) {
  check_rows<T, 1>(where, what, list, {num_tokens}, {dtype_of<T>()}, device);
  if (device.kind != DeviceKind::kCpu) return;
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (accepts(list.data[t])) continue;
    refuse(where, std::string(what) + "[" + std::to_string(t) + "]", expected,
           std::to_string(list.data[t]));
  }
}

}  // namespace mla::layer
