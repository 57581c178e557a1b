#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "mla/attention.hpp"
#include "mla/error.hpp"
#include "mla/kv_step.hpp"
#include "mla/merge.hpp"
#include "mla/mla_engine.h"
#include "mla/tensor_view.hpp"

// What C callers pass, checked for what C++ types rule out (null, ranks, values of enumerations)
// and turned into those types. `name` and `where` are the argument and the call, for messages.
namespace mla::capi {

/// What a null label stands for.
inline constexpr const char* kMainLabel = "main";

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

/// 0 of each: its default.
Limits limits_from_c(int64_t max_rows, int64_t max_tokens, int64_t max_listed_pages);
/// None where both are 0. Throws InvalidArgument unless both are given then.
std::optional<Bucket> bucket_from_c(int64_t rows, int64_t tokens, const char* owner,
                                    const char* where);
/// Throws InvalidArgument where one of address and size is given without the other.
std::span<std::byte> lent_from_c(void* memory, size_t bytes, const char* name, const char* where);
/// Null stands for `fallback`.
inline const char* name_from_c(const char* text, const char* fallback) {
  return text == nullptr ? fallback : text;
}
inline KvStream stream_from_c(const mla_kv_stream& stream) {
  return {.request = stream.request, .label = name_from_c(stream.label, kMainLabel)};
}

void check_count(int64_t count, int64_t most, const char* name, const char* where);
void check_array(const void* entries, int64_t count, const char* name, const char* where);

/// `count` entries. Throws InvalidArgument (a negative count, one beyond 2^31, no array).
template <class T>
std::span<const T> array_from_c(const T* entries, int64_t count, const char* name,
                                const char* where) {
  check_array(entries, count, name, where);
  return {entries, static_cast<size_t>(count)};
}

void check_rank(int32_t rank, int expected, const char* name, const char* where);
void check_dtype(DType dtype, DType expected, const char* name, const char* where);

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

template <int Rank>
Tensor<Rank> tensor_from_c(const mla_tensor* tensor, const char* name, const char* where) {
  return tensor_from_c<Rank>(not_null(tensor, name, where), name, where);
}

/// Empty where the pointer is null.
template <int Rank>
Tensor<Rank> optional_from_c(const mla_tensor* tensor, const char* name, const char* where) {
  return tensor == nullptr ? Tensor<Rank>{} : tensor_from_c<Rank>(*tensor, name, where);
}

/// A view of a tensor that must hold elements of type T, or was left out.
template <class T, int Rank>
TensorView<T, Rank> typed_from_c(const mla_tensor& tensor, const char* name, const char* where) {
  const Tensor<Rank> view = tensor_from_c<Rank>(tensor, name, where);
  if (tensor.rank != 0) check_dtype(view.dtype, dtype_of<T>(), name, where);
  return {static_cast<T*>(view.data), view.shape, view.stride, view.device};
}

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
