#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>

#include "mla/device.hpp"
#include "mla/dtype.hpp"

namespace mla {

/// A tensor that somebody else owns. Strides count elements, never bytes. A view of `void` carries
/// its element type in `dtype`; a typed view has its own there. Copies are cheap.
template <class T, int Rank>
struct TensorView {
  T* data = nullptr;
  std::array<int64_t, Rank> shape{};
  std::array<int64_t, Rank> stride{};
  Device device{};
  DType dtype = dtype_of<T>();

  bool empty() const {
    for (const int64_t extent : shape) {
      if (extent == 0) return true;
    }
    return false;
  }

  /// Typed views widen to const and to void.
  template <class U>
    requires(!std::is_same_v<T, U> &&
             (std::is_same_v<const T, U> || std::is_same_v<std::remove_const_t<U>, void>) &&
             (std::is_const_v<U> || !std::is_const_v<T>))
  operator TensorView<U, Rank>() const {  // NOLINT(google-explicit-constructor): a widening
    return {data, shape, stride, device, dtype};
  }
};

template <int Rank>
using ConstTensor = TensorView<const void, Rank>;
template <int Rank>
using Tensor = TensorView<void, Rank>;

/// Strides of a row-major tensor without gaps.
template <size_t Rank>
constexpr std::array<int64_t, Rank> contiguous_strides(const std::array<int64_t, Rank>& shape) {
  std::array<int64_t, Rank> stride{};
  int64_t step = 1;
  for (size_t d = Rank; d-- > 0;) {
    stride[d] = step;
    step *= shape[d];
  }
  return stride;
}

/// A row-major view without gaps over `data`.
template <class T, size_t Rank>
TensorView<T, static_cast<int>(Rank)> contiguous_view(T* data,
                                                      const std::array<int64_t, Rank>& shape,
                                                      Device device = {}) {
  return {data, shape, contiguous_strides(shape), device, dtype_of<T>()};
}

/// The same for memory whose element type is known at run time only.
template <class T, size_t Rank>
  requires std::is_void_v<T>
TensorView<T, static_cast<int>(Rank)> contiguous_view(T* data,
                                                      const std::array<int64_t, Rank>& shape,
                                                      DType dtype, Device device = {}) {
  return {data, shape, contiguous_strides(shape), device, dtype};
}

/// Columns [begin, begin + width) of the last dimension. Does not check the bounds.
template <class T, int Rank>
TensorView<T, Rank> columns(TensorView<T, Rank> view, int64_t begin, int64_t width) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  using Void = std::conditional_t<std::is_const_v<T>, const void, void>;
  if (view.data != nullptr) {
    Byte* bytes = static_cast<Byte*>(static_cast<Void*>(view.data));
    bytes += begin * view.stride[Rank - 1] * size_of(view.dtype);
    view.data = static_cast<T*>(static_cast<Void*>(bytes));
  }
  view.shape[Rank - 1] = width;
  return view;
}

/// "[2, 16, 512]", for messages.
template <size_t Rank>
std::string to_string(const std::array<int64_t, Rank>& shape) {
  std::string text = "[";
  for (size_t d = 0; d < Rank; ++d) text += (d == 0 ? "" : ", ") + std::to_string(shape[d]);
  return text + "]";
}

}  // namespace mla
