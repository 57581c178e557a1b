#pragma once

#include "box.hpp"
#include "mla/attention.hpp"

namespace mla::py {

template <>
inline constexpr const char* kTypeKey<PagedAttention> = "libmla.PagedAttention";
using AttentionBox = Box<PagedAttention>;

}  // namespace mla::py
