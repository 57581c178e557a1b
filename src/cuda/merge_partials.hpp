#pragma once

#include "core/attention_impl.hpp"

namespace mla::cuda {

/// Queues the merges of the launch's plan: partial results, written on the stream before, into out
/// and lse. The launch's shape does not depend on the plan.
void launch_merge(const AttentionLaunch& launch, Stream stream);

/// Does once what a first launch for the geometry would do.
void prepare_merge(const Geometry& geometry);

}  // namespace mla::cuda
