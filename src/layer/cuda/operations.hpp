#pragma once

#include <memory>

#include "layer/operations.hpp"

namespace mla::layer::cuda {

/// Throws InvalidArgument where the device is not there, or this build or machine lacks what a
/// layer needs on it.
void check_available(Device device);

/// The operations of a CUDA device, which is available: cuBLAS for products, and a kernel for each
/// of the others.
std::unique_ptr<Operations> make_operations(Device device);

}  // namespace mla::layer::cuda
