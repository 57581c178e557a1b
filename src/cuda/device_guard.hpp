#pragma once

#include <cuda_runtime_api.h>

#include "cuda/error.hpp"

namespace mla::cuda {

/// Makes a device the current one of this thread, and the former one again at its end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t index) {
    MLA_CUDA_CHECK(cudaGetDevice(&former_));
    if (former_ == index) return;
    MLA_CUDA_CHECK(cudaSetDevice(index));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(former_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int former_ = 0;
  bool changed_ = false;
};

}  // namespace mla::cuda
