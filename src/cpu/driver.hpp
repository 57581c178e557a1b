#pragma once

#include "core/attention_impl.hpp"

namespace mla::cpu {

/// Runs a plan: every worker its tiles, then all of them the merges of split rows. Returns when
/// the outputs are written; allocates nothing.
void run_schedule(const AttentionImpl& impl, const AttentionLaunch& launch);

}  // namespace mla::cpu
