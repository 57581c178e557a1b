#include "mla/supports.hpp"

#include "core/attention_impl.hpp"
#include "core/checks.hpp"
#include "cpu/impls.hpp"
#include "cuda/impls.hpp"
#include "device/runtime.hpp"

namespace mla {

std::span<const AttentionImpl* const> attention_impls(DeviceKind kind) {
  return kind == DeviceKind::kCuda ? cuda::impls() : cpu::impls();
}

const AttentionImpl* find_impl(const KernelQuery& query, std::string_view name) {
  for (const AttentionImpl* impl : attention_impls(query.device.kind)) {
    if (!name.empty() && impl->name != name) continue;
    if (impl->refuses(query) == nullptr) return impl;
  }
  return nullptr;
}

Support supports(const Geometry& geometry, Device device, std::optional<CacheStrides> strides,
                 std::string_view kernel) {
  Support answer;
  if (GeometryFault fault; find_fault(geometry, fault)) {
    answer.reason = fault.what + ": expected " + fault.expected + ", got " + fault.got;
    return answer;
  }
  std::string missing;
  if (device::find_runtime(device, missing) == nullptr) {
    answer.reason = to_string(device) + " is not there; there is " + missing;
    return answer;
  }
  const KernelQuery query{geometry, strides.value_or(pool_strides(geometry)), device};
  for (const AttentionImpl* impl : attention_impls(device.kind)) {
    if (!kernel.empty() && impl->name != kernel) continue;
    const char* refusal = impl->refuses(query);
    answer.considered.push_back({std::string(impl->name), refusal == nullptr ? "" : refusal});
    if (refusal != nullptr || answer) continue;
    answer.kernel = impl->name;
    answer.rounds_probabilities = impl->rounds_probabilities;
    answer.capturable = device.kind == DeviceKind::kRecording || impl->capturable;
    answer.reason = kernel.empty() ? "first of the " + to_string(device) + " kernels that accepts"
                                   : "asked for by name";
  }
  if (answer) return answer;
  if (answer.considered.empty()) {
    answer.reason = kernel.empty()
                        ? "this build has no kernels for " + to_string(device)
                        : to_string(device) + " has no kernel \"" + std::string(kernel) + "\"";
  } else {
    answer.reason = "every kernel refuses:";
    for (const KernelVerdict& verdict : answer.considered) {
      answer.reason += " " + verdict.kernel + " (" + verdict.refusal + ")";
    }
  }
  return answer;
}

}  // namespace mla
