#pragma once

#include "core/attention_impl.hpp"

namespace mla::cuda::general {

/// Every shape and dtype of the contract, in fp32 arithmetic without tensor cores.
extern const AttentionImpl kSimtImpl;

}  // namespace mla::cuda::general
