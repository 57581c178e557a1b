#pragma once

// What every attention_ISA.cpp gives to the tables, of the instruction set that it sets before it
// includes this file, once. Nothing here is compiled for more than the baseline.

#include <string_view>

#include "cpu/attention-inl.hpp"
#include "cpu/probes-inl.hpp"
#include "cpu/simd_impls.hpp"

namespace mla::cpu {
namespace {

namespace isa = HWY_NAMESPACE;

template <const char* (*kMissing)()>
const char* refuses(const KernelQuery& /*query*/) {
  return kMissing();
}

template <const KernelSpeed& kSpeed>
plan::CostModel cost_model(const KernelQuery& query) {
  return simd_cost_model(query.geometry, isa::kLanes, kSpeed);
}

/// kMissing says what the machine lacks; kSpeed is how fast the kernel runs.
template <const char* (*kMissing)(), const KernelSpeed& kSpeed>
constexpr AttentionImpl make_impl(std::string_view name) {
  return {.name = name,
          .capturable = false,
          .refuses = &refuses<kMissing>,
          .cost_model = &cost_model<kSpeed>,
          .worker_bytes = &isa::worker_bytes,
          .run_tile = &isa::run_tile};
}

constexpr MachineProbes kProbes = {.multiply_add = &isa::multiply_add_probe,
                                   .read = &isa::read_probe};

}  // namespace
}  // namespace mla::cpu
