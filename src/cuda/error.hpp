#pragma once

#include <cuda_runtime_api.h>

#include "mla/export.hpp"

namespace mla::cuda {

/// Throws CudaError unless `result` is success, and clears the error where it can be cleared.
/// Exported for mla::layer, which is a library of its own.
MLA_API void check(cudaError_t result, const char* call, const char* where);

}  // namespace mla::cuda

/// Evaluates a call of the CUDA runtime and throws CudaError, with the call's text, if it fails.
#define MLA_CUDA_CHECK(call) ::mla::cuda::check((call), #call, __func__)
