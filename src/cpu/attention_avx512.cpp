#define HWY_BASELINE_TARGETS HWY_AVX3
#define HWY_COMPILE_ONLY_STATIC
#define HWY_DISABLE_PCLMUL_AES
#include "cpu/attention-inl.hpp"
#include "cpu/probes-inl.hpp"
#include "cpu/simd_impls.hpp"

namespace mla::cpu {
namespace {

namespace isa = HWY_NAMESPACE;

const char* refuses(const KernelQuery&) { return avx512_missing(); }

// Measured as docs/kernels/cpu.md tells.
plan::CostModel cost_model(const KernelQuery& query) {
  return simd_cost_model(query.geometry, isa::kLanes,
                         {.fma_per_ns = 83, .widen_per_ns = 7, .partial_per_ns = 0.52});
}

}  // namespace

const AttentionImpl kAvx512Impl = {.name = "cpu_avx512",
                                   .capturable = false,
                                   .refuses = &refuses,
                                   .cost_model = &cost_model,
                                   .worker_bytes = &isa::worker_bytes,
                                   .run_tile = &isa::run_tile};

const MachineProbes kAvx512Probes = {.multiply_add = &isa::multiply_add_probe,
                                     .read = &isa::read_probe};

}  // namespace mla::cpu
