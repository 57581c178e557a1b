#include "layer/cuda/operations.hpp"
#include "mla/error.hpp"

// Stands for this folder in a build without CUDA or without the header of cuBLAS.
namespace mla::layer {

void cuda::check_available(Device device) {
  throw_invalid({.what = "device",
                 .where = "LayerOptions",
                 .expected = "cpu: this build of mla::layer has no CUDA",
                 .got = to_string(device)});
}

std::unique_ptr<Operations> cuda::make_operations(Device device) {
  check_available(device);
  return nullptr;
}

}  // namespace mla::layer
