#include "cuda/device_limits.hpp"
#include "cuda/error.hpp"
#include "cuda/launch.hpp"
#include "cuda/merge_partials.hpp"
#include "cuda/merge_rows.cuh"

namespace mla::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * merging::kWarp;
constexpr int kBlocksPerSm = 4;

/// `kIsWhole`: the rank is a multiple of four.
template <bool kIsWhole>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    merge_partials_kernel(const __grid_constant__ KernelParams params) {
  __shared__ MergedSums<1> sums;
  if (params.image.view(params.plan).num_merges == 0) return;
  merge_share<AnyRows<kIsWhole>, kWarps>(
      params, nullptr, sums, blockIdx.x, gridDim.x, [] {}, [] { __syncthreads(); });
}

using Kernel = void (*)(KernelParams);

Kernel kernel_of(const Geometry& geometry) {
  return geometry.kv_lora_rank % merging::kValues == 0 ? &merge_partials_kernel<true>
                                                       : &merge_partials_kernel<false>;
}

}  // namespace

void launch_merge(const AttentionLaunch& launch, Stream stream) {
  const auto num_blocks =
      static_cast<unsigned>(kBlocksPerSm * device_limits(launch.device.index).num_sms);
  launch_kernel("merge_partials_kernel", kernel_of(launch.params.geometry),
                {.count = num_blocks, .threads = kThreads}, stream, kernel_params(launch));
}

void prepare_merge(const Geometry& geometry) {
  cudaFuncAttributes attributes;  // loads the kernel
  MLA_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel_of(geometry)));
}

}  // namespace mla::cuda
