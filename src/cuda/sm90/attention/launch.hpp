#pragma once

#include "core/attention_impl.hpp"

namespace mla::cuda::sm90 {

/// 512 + 64 and 512 + 0 in bf16 and fp16 on compute capability 9.0: any page size, head count and
/// lengths; cache strides of 16 bytes, everything else at any stride and address.
extern const AttentionImpl kDenseImpl;

}  // namespace mla::cuda::sm90
