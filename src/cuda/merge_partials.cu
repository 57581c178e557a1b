#include "cuda/device_limits.hpp"
#include "cuda/error.hpp"
#include "cuda/merge_partials.hpp"
#include "cuda/numbers.cuh"
#include "cuda/rows.cuh"

namespace mla::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kValues = 4;                 // columns of a lane
constexpr int kColumns = kWarp * kValues;  // of an item of work
constexpr uint32_t kAllLanes = 0xffffffff;

// The merge that row `row` of all merged rows belongs to: the last whose rows begin at or before
// it. One warp looks at 32 places at a time, since loads that wait for each other are what it
// costs.
__device__ int64_t find_merge(const PlanView& plan, int64_t row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t begin = 0;
  int64_t count = plan.num_merges;
  while (count > 1) {
    const int64_t step = (count + kWarp - 1) / kWarp;
    const int64_t at = lane * step;
    const bool starts_before = at < count && plan.merges[begin + at].rows_before <= row;
    const int last = 31 - __clz(static_cast<int>(__ballot_sync(kAllLanes, starts_before)));
    begin += last * step;
    count = min(step, count - last * step);
  }
  return begin;
}

struct Shared {
  float weights[kMaxParts];
  float reduced[kWarps];
  float sums[kWarps][kColumns];
};

template <class Join>
__device__ float reduce(float value, float* reduced, const Join& join) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    value = join(value, __shfl_xor_sync(kAllLanes, value, mask));
  }
  if (threadIdx.x % kWarp == 0) reduced[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = reduced[0];
  for (int w = 1; w < kWarps; ++w) value = join(value, reduced[w]);
  __syncthreads();
  return value;
}

// An item is a row and a range of columns. Warps share out the parts, lanes the columns.
__global__ void __launch_bounds__(kThreads)
    merge_partials_kernel(const __grid_constant__ KernelParams params) {
  __shared__ Shared shared;
  const PlanView plan = params.image.view(params.plan);
  if (plan.num_merges == 0) return;
  const AttentionParams& tensors = params.tensors;
  const int32_t rank = tensors.geometry.kv_lora_rank;
  const int32_t num_heads = tensors.geometry.num_heads;
  const int64_t ranges = (rank + kColumns - 1) / kColumns;
  const plan::Merge& last = plan.merges[plan.num_merges - 1];
  const int64_t num_items = (int64_t{last.rows_before} + last.num_rows) * ranges;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp;
  const int lane = thread % kWarp;

  for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const int64_t merged_row = item / ranges;
    const auto range = static_cast<int32_t>(item % ranges);
    const plan::Merge merge = plan.merges[find_merge(plan, merged_row)];
    if (merge.request >= params.num_requests) continue;
    const int64_t row_in_merge = merged_row - merge.rows_before;
    const float* lse = tensors.partial_lse + merge.partial_begin + row_in_merge;

    float largest = -INFINITY;
    for (int p = thread; p < merge.num_partials; p += kThreads) {
      const float value = lse[int64_t{p} * merge.num_rows];
      shared.weights[p] = value;
      largest = fmaxf(largest, value);
    }
    largest = reduce(largest, shared.reduced, [](float a, float b) { return fmaxf(a, b); });
    float sum = 0;
    for (int p = thread; p < merge.num_partials; p += kThreads) {
      const float value = shared.weights[p];
      const float weight = value == -INFINITY ? 0.0F : expf(value - largest);
      shared.weights[p] = weight;
      sum += weight;
    }
    sum = reduce(sum, shared.reduced, [](float a, float b) { return a + b; });

    const int32_t first = range * kColumns + lane;
    float values[kValues] = {};
#pragma unroll 4
    for (int p = warp; p < merge.num_partials; p += kWarps) {
      const float weight = shared.weights[p];
      if (weight == 0) continue;  // its row may be stale
      const float* part = tensors.partial_out +
                          (merge.partial_begin + row_in_merge + int64_t{p} * merge.num_rows) * rank;
      for (int v = 0; v < kValues; ++v) {
        const int32_t c = first + v * kWarp;
        if (c < rank) values[v] = fmaf(weight, part[c], values[v]);
      }
    }
    for (int v = 0; v < kValues; ++v) shared.sums[warp][v * kWarp + lane] = values[v];
    __syncthreads();

    const RowPlace at = place_of(plan, num_heads, merge.request, merge.row_begin + row_in_merge);
    const int64_t out_at = at.token * tensors.out_token_stride + at.head * tensors.out_head_stride;
    const int32_t column = range * kColumns + thread;
    if (thread < kColumns && column < rank) {
      float total = 0;
      for (int w = 0; w < kWarps; ++w) total += shared.sums[w][thread];
      store_float(sum == 0 ? 0.0F : total / sum, tensors.out, tensors.geometry.dtype,
                  out_at + column);
    }
    if (thread == 0 && range == 0) {
      write_lse(tensors, plan, at, sum == 0 ? -INFINITY : largest + logf(sum));
    }
    __syncthreads();  // the next item writes what this one read
  }
}

}  // namespace

void launch_merge(const AttentionLaunch& launch, Stream stream) {
  constexpr int kBlocksPerSm = 4;
  const int num_blocks = kBlocksPerSm * device_limits(launch.device.index).num_sms;
  merge_partials_kernel<<<num_blocks, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(
      kernel_params(launch));
  MLA_CUDA_CHECK(cudaGetLastError());
}

void prepare_merge() {
  cudaFuncAttributes attributes;  // loads the kernel
  MLA_CUDA_CHECK(cudaFuncGetAttributes(&attributes, merge_partials_kernel));
}

}  // namespace mla::cuda
