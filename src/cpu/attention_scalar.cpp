#define HWY_COMPILE_ONLY_SCALAR
#include "cpu/simd_impl-inl.hpp"

namespace mla::cpu {

// Measured as docs/kernels/cpu.md tells.
static constexpr KernelSpeed kSpeed{.fma_per_ns = 2.8, .widen_per_ns = 4, .partial_per_ns = 0.17};

constinit const AttentionImpl kScalarImpl = make_impl<nothing_missing, kSpeed>("cpu_scalar");
constinit const MachineProbes kScalarProbes = kProbes;

}  // namespace mla::cpu
