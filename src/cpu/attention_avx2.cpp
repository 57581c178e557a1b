#define HWY_BASELINE_TARGETS HWY_AVX2
#define HWY_COMPILE_ONLY_STATIC
#define HWY_DISABLE_PCLMUL_AES
#include "cpu/attention-inl.hpp"
#include "cpu/probes-inl.hpp"
#include "cpu/simd_impls.hpp"

namespace mla::cpu {
namespace {

namespace isa = HWY_NAMESPACE;

const char* refuses(const KernelQuery&) { return avx2_missing(); }

// Measured as docs/kernels/cpu.md tells.
plan::CostModel cost_model(const KernelQuery& query) {
  return simd_cost_model(query.geometry, isa::kLanes,
                         {.fma_per_ns = 35, .widen_per_ns = 11, .partial_per_ns = 0.45});
}

}  // namespace

const AttentionImpl kAvx2Impl = {.name = "cpu_avx2",
                                 .capturable = false,
                                 .refuses = &refuses,
                                 .cost_model = &cost_model,
                                 .worker_bytes = &isa::worker_bytes,
                                 .run_tile = &isa::run_tile};

const MachineProbes kAvx2Probes = {.multiply_add = &isa::multiply_add_probe,
                                   .read = &isa::read_probe};

}  // namespace mla::cpu
