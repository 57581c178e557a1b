#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "box.hpp"
#include "mla/attention.hpp"
#include "tensor.hpp"

namespace mla::py {

// Records of the public headers as the Python side passes them: their fields, in order.
using Fields = tvm::ffi::Array<int64_t>;

template <>
inline constexpr const char* kTypeKey<std::shared_ptr<Executor>> = "libmla.Executor";
using ExecutorBox = Box<std::shared_ptr<Executor>>;

/// Throws InvalidArgument where the value does not fit.
int32_t narrow(int64_t value, ArgName name);

Device device_from(int64_t kind, int64_t index);
Geometry geometry_from(const Fields& fields, const char* where);
std::optional<CacheStrides> strides_from(const tvm::ffi::Optional<Fields>& fields);
Limits limits_from(const Fields& fields);
SplitPolicy splits_from(const Fields& fields, const char* where);
std::shared_ptr<Executor> executor_from(const tvm::ffi::Optional<ExecutorBox>& box);
inline std::string_view text_of(const tvm::ffi::String& text) { return {text.data(), text.size()}; }
/// Python has handles as numbers.
inline Stream stream_from(int64_t handle) {
  return {reinterpret_cast<void*>(handle)};  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace mla::py
