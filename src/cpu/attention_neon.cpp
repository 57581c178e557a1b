#define HWY_BASELINE_TARGETS HWY_NEON
#define HWY_COMPILE_ONLY_STATIC
#include "cpu/attention-inl.hpp"
#include "cpu/probes-inl.hpp"
#include "cpu/simd_impls.hpp"

namespace mla::cpu {
namespace {

namespace isa = HWY_NAMESPACE;

const char* refuses(const KernelQuery&) { return nullptr; }

// Not measured: half of what AVX2 does, as the vectors are half as wide.
plan::CostModel cost_model(const KernelQuery& query) {
  return simd_cost_model(query.geometry, isa::kLanes,
                         {.fma_per_ns = 17, .widen_per_ns = 5, .partial_per_ns = 0.4});
}

}  // namespace

const AttentionImpl kNeonImpl = {.name = "cpu_neon",
                                 .capturable = false,
                                 .refuses = &refuses,
                                 .cost_model = &cost_model,
                                 .worker_bytes = &isa::worker_bytes,
                                 .run_tile = &isa::run_tile};

const MachineProbes kNeonProbes = {.multiply_add = &isa::multiply_add_probe,
                                   .read = &isa::read_probe};

}  // namespace mla::cpu
