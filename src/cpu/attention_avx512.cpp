#define HWY_BASELINE_TARGETS HWY_AVX3
#define HWY_COMPILE_ONLY_STATIC
#define HWY_DISABLE_PCLMUL_AES
#include "cpu/simd_impl-inl.hpp"

namespace mla::cpu {

// Measured as docs/kernels/cpu.md tells.
static constexpr KernelSpeed kSpeed{.fma_per_ns = 83, .widen_per_ns = 7, .partial_per_ns = 0.52};

constinit const AttentionImpl kAvx512Impl = make_impl<avx512_missing, kSpeed>("cpu_avx512");
constinit const MachineProbes kAvx512Probes = kProbes;

}  // namespace mla::cpu
