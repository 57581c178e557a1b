#include "core/attention_impl.hpp"
#include "cpu/reference.hpp"

namespace mla {
namespace {

// In order of preference. The reference is last: it is there to be asked for by name.
constexpr const AttentionImpl* kCpuImpls[] = {
    &cpu::kReferenceImpl,
};

}  // namespace

std::span<const AttentionImpl* const> attention_impls(DeviceKind kind) {
  if (kind == DeviceKind::kCpu) return kCpuImpls;
  return {};
}

}  // namespace mla
