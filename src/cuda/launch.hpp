#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "cuda/error.hpp"
#include "mla/device.hpp"

namespace mla::cuda {

/// The blocks of a launch.
struct Blocks {
  dim3 count;
  int threads;
  size_t dynamic_bytes = 0;  ///< of shared memory, for each
};

/// Queues a kernel. Throws CudaError, with its `name`, if that fails: by what the launch itself
/// returns, since cudaGetLastError() after <<<>>> may return an older error of the caller's.
template <class... Parameters, class... Arguments>
void launch_kernel(const char* name, void (*kernel)(Parameters...), const Blocks& blocks,
                   Stream stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks.count;
  config.blockDim = dim3(static_cast<unsigned>(blocks.threads));
  config.dynamicSmemBytes = blocks.dynamic_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name, "launch");
}

}  // namespace mla::cuda
