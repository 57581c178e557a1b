#define HWY_BASELINE_TARGETS HWY_NEON
#define HWY_COMPILE_ONLY_STATIC
#include "cpu/simd_impl-inl.hpp"

namespace mla::cpu {

// Not measured: half of what AVX2 does, as the vectors are half as wide.
static constexpr KernelSpeed kSpeed{.fma_per_ns = 17, .widen_per_ns = 5, .partial_per_ns = 0.4};

constinit const AttentionImpl kNeonImpl = make_impl<nothing_missing, kSpeed>("cpu_neon");
constinit const MachineProbes kNeonProbes = kProbes;

}  // namespace mla::cpu
