#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/card.hpp"
#include "cuda/cuda_test.hpp"
#include "cuda/error.hpp"
#include "cuda/sm90/ptx.cuh"

// What the tests of src/cuda/sm90/ptx.cuh share. Each instruction runs by itself, in a block or a
// cluster of its own, against what ptx.cuh says of it: the layouts are computed from its words.
// What has no result to compare, a thread's number of registers, is left to the kernel's own tests.
namespace mla::cuda::sm90 {

using test::DeviceArray;

inline constexpr int kLanes = 32;
inline constexpr int kGroupThreads = 128;  // a warpgroup
inline constexpr uint32_t kFilled = 0xffffffff;
inline constexpr uint32_t kLateNs = 50'000;  // far more than what does not wait for it takes

class Ptx : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const Card card = describe_card(kCuda.index);
    if (card.compute_capability != 90) {
      GTEST_SKIP() << "it needs compute capability 9.0, and " << card.name << " has "
                   << card.compute_capability / 10 << '.' << card.compute_capability % 10;
    }
  }
};

/// Runs a kernel on blocks that are one cluster.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), unsigned blocks, unsigned threads, const Args&... args) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.attrs = &cluster;
  config.numAttrs = 1;
  MLA_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

/// What a kernel fills, zeros before.
template <class T>
DeviceArray<T> results(size_t count) {
  return DeviceArray<T>(kCuda, std::vector<T>(count));
}

/// Whether the phase ends, within about half a second.
__device__ inline bool ends_in_time(uint32_t barrier, uint32_t parity) {
  constexpr int64_t kCycles = int64_t{1} << 30;
  const int64_t begin = clock64();
  while (!barrier_test(barrier, parity)) {
    if (clock64() - begin > kCycles) return false;
  }
  return true;
}

// By all threads of a block: what lies in shared memory, seen by the asynchronous proxy too, and
// what is found there. `bytes` is a multiple of 16.

__device__ inline void fill_shared(void* to, int bytes) {
  for (uint32_t i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) {
    store_shared(shared_address(to) + i, make_uint4(kFilled, kFilled, kFilled, kFilled));
  }
  fence_async_proxy();
  __syncthreads();
}

__device__ inline void to_shared(void* to, const void* from, int bytes) {
  for (uint32_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
    store_shared(shared_address(to) + i * 16, static_cast<const uint4*>(from)[i]);
  }
  fence_async_proxy();
  __syncthreads();
}

__device__ inline void from_shared(void* to, const void* from, int bytes) {
  for (uint32_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) {
    static_cast<uint32_t*>(to)[i] = static_cast<const uint32_t*>(from)[i];
  }
}

// Matrices of 16-bit elements in shared memory: strips of 64 columns, swizzled.

inline constexpr int kStripColumns = 64;
inline constexpr int kRows = 64;
inline constexpr int kStripElements = kRows * kStripColumns;
inline constexpr int kStripBytes = kStripElements * 2;
inline constexpr int kSwizzleAlignment = 1024;

/// Where eight rows of a strip lie, 1,024 bytes: elements from a strip to the next and from eight
/// rows to the next eight.
struct MatrixLayout {
  int strip, eight_rows;
};
inline constexpr int kEightRows = 8 * kStripColumns;
/// Strip after strip.
inline constexpr MatrixLayout kByStrips{kStripElements, kEightRows};
/// Eight rows of all strips after eight rows.
constexpr MatrixLayout by_rows(int columns) { return {kEightRows, 8 * columns}; }

/// [kRows, columns] as it lies there.
template <class T>
std::vector<T> swizzled(const std::vector<T>& matrix, int columns,
                        MatrixLayout layout = kByStrips) {
  constexpr int kChunkElements = 8;
  std::vector<T> image(matrix.size());
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < columns; ++column) {
      const int strip = column / kStripColumns, chunk = column % kStripColumns / kChunkElements;
      image[strip * layout.strip + row / 8 * layout.eight_rows + row % 8 * kStripColumns +
            (chunk ^ (row % 8)) * kChunkElements + column % kChunkElements] =
          matrix[row * columns + column];
    }
  }
  return image;
}

}  // namespace mla::cuda::sm90
