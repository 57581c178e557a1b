#include "cuda/impls.hpp"
#include "device/runtimes.hpp"

// Stands for this folder in a build without CUDA.
namespace mla {

std::span<const AttentionImpl* const> cuda::impls() { return {}; }

device::Runtime* device::find_cuda_runtime(int32_t, std::string& reason) {
  reason = "cpu: this build of the library has no CUDA";
  return nullptr;
}

}  // namespace mla
