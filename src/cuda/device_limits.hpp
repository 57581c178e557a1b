#pragma once

#include <cstdint>
#include <string>

namespace mla::cuda {

/// What kernels are shaped by.
struct DeviceLimits {
  std::string name{};              ///< the driver's
  int32_t compute_capability = 0;  ///< 90 for 9.0
  int32_t num_sms = 0;
  int32_t smem_per_block = 0;  ///< bytes, with the opt-in
};

/// Of device `index`, which exists. Asked of the driver once.
const DeviceLimits& device_limits(int32_t index);

}  // namespace mla::cuda
