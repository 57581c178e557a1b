#pragma once

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>

#include "box.hpp"
#include "mla/attention_resource.hpp"
#include "mla/kv_resource.hpp"

namespace mla::py {

template <>
inline constexpr const char* kTypeKey<KvResource> = "libmla.KvResource";
using KvBox = Box<KvResource>;

template <>
inline constexpr const char* kTypeKey<AttentionResource> = "libmla.AttentionResource";
using AttentionResourceBox = Box<AttentionResource>;

/// An AdmitResult: pages_short, then request, label and pages of each shortage.
using Answer = tvm::ffi::Array<tvm::ffi::Any>;
Answer answer_of(const AdmitResult& result);

}  // namespace mla::py
