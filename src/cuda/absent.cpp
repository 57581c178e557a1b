#include "cuda/card.hpp"
#include "cuda/impls.hpp"
#include "device/runtime.hpp"
#include "device/runtimes.hpp"

// Stands for this folder in a build without CUDA.
namespace mla {

std::span<const AttentionImpl* const> cuda::impls() { return {}; }

device::Runtime* device::find_cuda_runtime(int32_t, std::string& reason) {
  reason = "cpu: this build of the library has no CUDA";
  return nullptr;
}

cuda::Card cuda::describe_card(int32_t index) {
  device::runtime_of({DeviceKind::kCuda, index}, "device", "describe_card");  // throws
  return {};
}

std::vector<cuda::Card> cuda::describe_cards(std::string& missing) {
  missing = "this build of the library has no CUDA";
  return {};
}

}  // namespace mla
