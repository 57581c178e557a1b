#include "layer/operations.hpp"

#include "layer/cuda/operations.hpp"
#include "layer/host_operations.hpp"

namespace mla::layer {

std::unique_ptr<Operations> make_operations(const LayerOptions& options) {
  if (options.device.kind == DeviceKind::kCuda) return cuda::make_operations(options.device);
  return std::make_unique<HostOperations>(options.executor);
}

}  // namespace mla::layer
