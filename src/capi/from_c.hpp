#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>

#include "mla/error.hpp"
#include "mla/geometry.hpp"
#include "mla/merge.hpp"
#include "mla/mla.h"
#include "mla/tensor_view.hpp"

// What C callers pass, checked for what C++ types rule out (null, ranks, values of enumerations)
// and turned into those types. `name` and `where` are the argument and the call, for messages.
namespace mla::capi {

[[noreturn]] void refuse_null(const char* name, const char* where);

template <class T>
T& not_null(T* pointer, const char* name, const char* where) {
  if (pointer == nullptr) refuse_null(name, where);
  return *pointer;
}

/// The size that the caller's struct says it has: that of an older, this or a newer header.
size_t checked_struct_size(size_t struct_size, size_t known, const char* name, const char* where);

/// Throws InvalidArgument where one of the bytes is not zero: a newer header's field is in use.
void check_unknown_fields(std::span<const std::byte> bytes, const char* name, const char* where);

/// A copy of the caller's struct; fields that its header did not have yet are zero.
template <class T>
T read_struct(const T* given, const char* name, const char* where) {
  const size_t size =
      checked_struct_size(not_null(given, name, where).struct_size, sizeof(T), name, where);
  const auto bytes = std::as_bytes(std::span(reinterpret_cast<const char*>(given), size));
  if (size > sizeof(T)) check_unknown_fields(bytes.subspan(sizeof(T)), name, where);
  T read{};
  std::memcpy(&read, given, std::min(size, sizeof(T)));
  return read;
}

/// Writes as much of `value` as the caller's struct has room for; fields that only a newer header
/// has become zero, and its struct_size stays.
template <class T>
void write_struct(T value, T* given, const char* name, const char* where) {
  const size_t size =
      checked_struct_size(not_null(given, name, where).struct_size, sizeof(T), name, where);
  value.struct_size = size;
  std::memset(given, 0, size);
  std::memcpy(given, &value, std::min(size, sizeof(T)));
}

Device device_from_c(mla_device device, const char* name, const char* where);
mla_device device_to_c(Device device);
DType dtype_from_c(int32_t dtype, const char* owner, const char* field, const char* where);
LseBase lse_base_from_c(int32_t base, const char* where);
bool flag_from_c(int32_t flag, const char* name, const char* where);
Geometry geometry_from_c(const mla_geometry* geometry, const char* where);
CacheStrides strides_from_c(const mla_cache_strides& strides);

void check_rank(int32_t rank, int expected, const char* name, const char* where);

/// A view of the tensor, whose rank must be Rank; an empty view of a tensor that was left out.
template <int Rank>
Tensor<Rank> tensor_from_c(const mla_tensor& tensor, const char* name, const char* where) {
  static_assert(Rank <= MLA_MAX_RANK);
  if (tensor.data == nullptr && tensor.rank == 0) return {};
  check_rank(tensor.rank, Rank, name, where);
  Tensor<Rank> view;
  view.data = tensor.data;
  std::copy_n(tensor.shape, Rank, view.shape.begin());
  std::copy_n(tensor.stride, Rank, view.stride.begin());
  view.device = device_from_c(tensor.device, name, where);
  view.dtype = dtype_from_c(tensor.dtype, name, ".dtype", where);
  return view;
}

/// [T, H], fp32.
TensorView<float, 2> lse_from_c(const mla_tensor& tensor, const char* name, const char* where);

template <class T, int Rank>
mla_tensor tensor_to_c(const TensorView<T, Rank>& view) {
  static_assert(Rank <= MLA_MAX_RANK);
  mla_tensor tensor{};
  tensor.data = const_cast<void*>(static_cast<const void*>(view.data));
  tensor.device = device_to_c(view.device);
  tensor.dtype = static_cast<int32_t>(view.dtype);
  tensor.rank = Rank;
  std::copy_n(view.shape.begin(), Rank, tensor.shape);
  std::copy_n(view.stride.begin(), Rank, tensor.stride);
  return tensor;
}

}  // namespace mla::capi
