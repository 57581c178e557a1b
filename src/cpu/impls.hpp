#pragma once

#include <span>

#include "core/attention_impl.hpp"

namespace mla::cpu {

/// The kernels that run on the host.
std::span<const AttentionImpl* const> impls();

}  // namespace mla::cpu
