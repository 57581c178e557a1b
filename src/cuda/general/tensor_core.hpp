#pragma once

#include "core/attention_impl.hpp"

namespace mla::cuda::general {

/// 16-bit caches of up to 512 columns of value and about 600 in all, on tensor cores (compute
/// capability 8.0 and later). Any page size, head count, strides and alignment.
extern const AttentionImpl kTensorCoreImpl;

}  // namespace mla::cuda::general
