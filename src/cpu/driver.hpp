#pragma once

#include <cstddef>

#include "core/attention_impl.hpp"
#include "core/plan_image.hpp"
#include "mla/executor.hpp"

namespace mla::cpu {

/// Runs a plan: every worker its tiles, then all of them the merges of split rows. Returns when
/// the outputs are written; allocates nothing.
/// num_requests   tiles of later requests are left out (a bucket's padding that was not handed in)
/// worker_memory  executor.num_threads() blocks of worker_stride bytes, 64-byte aligned
void run_schedule(const AttentionImpl& impl, const AttentionParams& params, const PlanView& plan,
                  int32_t num_requests, std::byte* worker_memory, size_t worker_stride,
                  Executor& executor);

}  // namespace mla::cpu
