#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "mla/device.hpp"
#include "mla/dtype.hpp"
#include "mla/error.hpp"
#include "mla/tensor_view.hpp"

namespace mla::py {

/// An argument for messages: its name and the call.
struct ArgName {
  const char* what;
  const char* where;
};

/// Throws InvalidArgument for devices and element types that the library does not have. Pinned host
/// memory counts as the CPU's.
Device device_of(const tvm::ffi::TensorView& tensor, ArgName name);
DType dtype_of(const tvm::ffi::TensorView& tensor, ArgName name);
DLDevice to_dl(Device device);
DLDataType to_dl(DType dtype);

std::byte* data_of(const tvm::ffi::TensorView& tensor);
void check_rank(const tvm::ffi::TensorView& tensor, int rank, ArgName name);
void check_dtype(const tvm::ffi::TensorView& tensor, DType wanted, ArgName name);

/// The library's view of a DLPack tensor of this rank. Throws InvalidArgument (rank, device,
/// dtype).
template <int Rank>
Tensor<Rank> view_of(const tvm::ffi::TensorView& tensor, ArgName name) {
  check_rank(tensor, Rank, name);
  Tensor<Rank> view{
      .data = data_of(tensor), .device = device_of(tensor, name), .dtype = dtype_of(tensor, name)};
  for (int d = 0; d < Rank; ++d) {
    view.shape[d] = tensor.size(d);
    view.stride[d] = tensor.stride(d);
  }
  // One column has no stride, an empty tensor none at all: producers differ in what they write.
  if (view.shape[Rank - 1] == 1) view.stride[Rank - 1] = 1;
  if (view.empty()) view.stride = contiguous_strides(view.shape);
  return view;
}

/// The same for an element type that is fixed.
template <class T, int Rank>
TensorView<T, Rank> typed_view_of(const tvm::ffi::TensorView& tensor, ArgName name) {
  check_dtype(tensor, mla::dtype_of<T>(), name);
  const Tensor<Rank> view = view_of<Rank>(tensor, name);
  return {static_cast<T*>(view.data), view.shape, view.stride, view.device};
}

/// Tensors that may be left out give a view without data.
template <int Rank>
Tensor<Rank> view_of(const tvm::ffi::Optional<tvm::ffi::TensorView>& tensor, ArgName name) {
  return tensor.has_value() ? view_of<Rank>(*tensor, name) : Tensor<Rank>{};
}
template <class T, int Rank>
TensorView<T, Rank> typed_view_of(const tvm::ffi::Optional<tvm::ffi::TensorView>& tensor,
                                  ArgName name) {
  return tensor.has_value() ? typed_view_of<T, Rank>(*tensor, name) : TensorView<T, Rank>{};
}

/// A host array [n] without gaps. Throws InvalidArgument (rank, dtype, device, stride).
template <class T>
std::span<const T> host_span_of(const tvm::ffi::TensorView& tensor, ArgName name) {
  const TensorView<T, 1> view = typed_view_of<T, 1>(tensor, name);
  if (view.device.kind != DeviceKind::kCpu) {
    throw_invalid({name.what, name.where, "an array in host memory", to_string(view.device)});
  }
  if (view.shape[0] > 1 && view.stride[0] != 1) {
    throw_invalid({name.what, name.where, "an array without gaps, stride 1",
                   "stride " + std::to_string(view.stride[0])});
  }
  return {view.data, static_cast<size_t>(view.shape[0])};
}
template <class T>
std::span<const T> host_span_of(const tvm::ffi::Optional<tvm::ffi::TensorView>& tensor,
                                ArgName name) {
  return tensor.has_value() ? host_span_of<T>(*tensor, name) : std::span<const T>{};
}

/// The bytes of a tensor without gaps, of any element type, on `device`.
std::span<std::byte> bytes_of(const tvm::ffi::Tensor& tensor, Device device, ArgName name);

/// A DLPack tensor over memory of `owner`, which lives as long as it does.
tvm::ffi::Tensor share(const void* data, std::span<const int64_t> shape,
                       std::span<const int64_t> stride, DType dtype, Device device,
                       tvm::ffi::ObjectRef owner);
template <class T, int Rank>
tvm::ffi::Tensor share(const TensorView<T, Rank>& view, tvm::ffi::ObjectRef owner) {
  return share(view.data, view.shape, view.stride, view.dtype, view.device, std::move(owner));
}

/// A host array [n] of its own.
tvm::ffi::Tensor copy(std::span<const int32_t> values);
tvm::ffi::Tensor copy(std::span<const int64_t> values);

}  // namespace mla::py
