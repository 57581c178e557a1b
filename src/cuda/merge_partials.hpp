#pragma once

#include "core/attention_impl.hpp"

namespace mla::cuda {

/// The most parts of one row that launch_merge can merge; kernels have no more workers.
inline constexpr int32_t kMaxParts = 1024;

/// Queues the merges of the launch's plan: partial results, written on the stream before, into out
/// and lse. The launch's shape does not depend on the plan.
void launch_merge(const AttentionLaunch& launch, Stream stream);

/// Does once what a first launch would do.
void prepare_merge();

}  // namespace mla::cuda
