#define HWY_COMPILE_ONLY_SCALAR
#include "cpu/attention-inl.hpp"
#include "cpu/probes-inl.hpp"
#include "cpu/simd_impls.hpp"

namespace mla::cpu {
namespace {

namespace isa = HWY_NAMESPACE;

const char* refuses(const KernelQuery&) { return nullptr; }

// Measured as docs/kernels/cpu.md tells.
plan::CostModel cost_model(const KernelQuery& query) {
  return simd_cost_model(query.geometry, isa::kLanes,
                         {.fma_per_ns = 2.8, .widen_per_ns = 4, .partial_per_ns = 0.17});
}

}  // namespace

const AttentionImpl kScalarImpl = {.name = "cpu_scalar",
                                   .capturable = false,
                                   .refuses = &refuses,
                                   .cost_model = &cost_model,
                                   .worker_bytes = &isa::worker_bytes,
                                   .run_tile = &isa::run_tile};

const MachineProbes kScalarProbes = {.multiply_add = &isa::multiply_add_probe,
                                     .read = &isa::read_probe};

}  // namespace mla::cpu
