#include "cpu/impls.hpp"

#include "cpu/reference.hpp"
#include "cpu/simd_impls.hpp"

namespace mla::cpu {
namespace {

// In order of preference. The reference is last: it is there to be asked for by name.
constexpr const AttentionImpl* kCpuImpls[] = {
#if defined(__x86_64__)
    &kAvx512Impl,
    &kAvx2Impl,
#elif defined(__aarch64__)
    &kNeonImpl,
#endif
    &kScalarImpl,
    &kReferenceImpl,
};

}  // namespace

std::span<const AttentionImpl* const> impls() { return kCpuImpls; }

}  // namespace mla::cpu
