#pragma once

#include <span>

#include "core/attention_impl.hpp"

namespace mla::cuda {

/// The kernels that run on an NVIDIA GPU, in order of preference; none in a build without CUDA.
std::span<const AttentionImpl* const> impls();

}  // namespace mla::cuda
