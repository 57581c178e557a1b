#include "core/attention_impl.hpp"
#include "cpu/reference.hpp"
#include "device/runtime.hpp"

namespace mla {
namespace {

// In order of preference. The reference is last: it is there to be asked for by name.
constexpr const AttentionImpl* kCpuImpls[] = {
    &cpu::kReferenceImpl,
};

}  // namespace

std::span<const AttentionImpl* const> attention_impls(DeviceKind kind) {
  return device::runs_on_host({kind, 0}) ? std::span(kCpuImpls)
                                         : std::span<const AttentionImpl* const>{};
}

}  // namespace mla
