#include "core/attention_impl.hpp"
#include "cpu/reference.hpp"
#include "cpu/simd_impls.hpp"
#include "device/runtime.hpp"

namespace mla {
namespace {

// In order of preference. The reference is last: it is there to be asked for by name.
constexpr const AttentionImpl* kCpuImpls[] = {
#if defined(__x86_64__)
    &cpu::kAvx512Impl,
    &cpu::kAvx2Impl,
#elif defined(__aarch64__)
    &cpu::kNeonImpl,
#endif
    &cpu::kScalarImpl,
    &cpu::kReferenceImpl,
};

}  // namespace

std::span<const AttentionImpl* const> attention_impls(DeviceKind kind) {
  return device::runs_on_host({kind, 0}) ? std::span(kCpuImpls)
                                         : std::span<const AttentionImpl* const>{};
}

}  // namespace mla
