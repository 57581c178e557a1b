#define HWY_BASELINE_TARGETS HWY_AVX2
#define HWY_COMPILE_ONLY_STATIC
#define HWY_DISABLE_PCLMUL_AES
#include "cpu/simd_impl-inl.hpp"

namespace mla::cpu {

// Measured as docs/kernels/cpu.md tells.
static constexpr KernelSpeed kSpeed{.fma_per_ns = 35, .widen_per_ns = 11, .partial_per_ns = 0.45};

constinit const AttentionImpl kAvx2Impl = make_impl<avx2_missing, kSpeed>("cpu_avx2");
constinit const MachineProbes kAvx2Probes = kProbes;

}  // namespace mla::cpu
