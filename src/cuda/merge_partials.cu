#include <cmath>
#include <cstdint>

#include "cuda/device_limits.hpp"
#include "cuda/error.hpp"
#include "cuda/merge_partials.hpp"
#include "cuda/numbers.cuh"
#include "cuda/rows.cuh"

// Work is cut into items: a row and 128 of its columns, four a lane. A warp merges an item alone,
// or a block where there are few. Parts are added up by eights, and the eights in order, so that
// the bits do not depend on who adds. The code is short on purpose: most of it runs once in a
// launch, from memory.
namespace mla::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kBlocksPerSm = 4;
constexpr int kValues = 4;                 // neighbouring columns of a lane
constexpr int kColumns = kWarp * kValues;  // of an item
constexpr int kEight = 8;
constexpr uint32_t kAllLanes = 0xffffffff;

struct Shared {
  float4 sums[kMaxSplits / kEight][kWarp];  // of eights
};

// The merge that row `row` of all merged rows belongs to: the last whose rows begin at or before
// it. One warp looks at 32 places at a time, since loads that wait for each other are what it
// costs.
__device__ uint32_t find_merge(const PlanView& plan, uint32_t row) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t begin = 0;
  auto count = static_cast<uint32_t>(plan.num_merges);
  while (count > 1) {
    const uint32_t step = (count + kWarp - 1) / kWarp;
    const uint32_t at = lane * step;
    const bool starts_before =
        at < count && static_cast<uint32_t>(plan.merges[begin + at].rows_before) <= row;
    const uint32_t last = 31 - __clz(static_cast<int>(__ballot_sync(kAllLanes, starts_before)));
    begin += last * step;
    count = min(step, count - last * step);
  }
  return begin;
}

/// One row of all merged rows.
struct MergedRow {
  uint32_t index = 0xffffffff;
  plan::Merge merge{};

  __device__ void find(const PlanView& plan, uint32_t row) {
    index = row;
    const uint32_t in_merge = row - static_cast<uint32_t>(merge.rows_before);
    if (in_merge >= static_cast<uint32_t>(merge.num_rows)) {
      merge = plan.merges[find_merge(plan, row)];
    }
  }
  __device__ int64_t row_in_merge() const { return index - merge.rows_before; }
  __device__ int64_t partial_row(int part) const {
    return merge.partial_begin + row_in_merge() + int64_t{part} * merge.num_rows;
  }
};

/// What its parts weigh.
struct PartWeights {
  float largest = -INFINITY;  // LSE
  float sum = 0;              // of the weights
  float of_lane = 0;          // the weight of part `lane`

  __device__ float of(float lse) const { return lse == -INFINITY ? 0.0F : expf(lse - largest); }
  __device__ float natural_lse() const { return sum == 0 ? -INFINITY : largest + logf(sum); }
};

__device__ PartWeights weigh_parts(const float* partial_lse, const MergedRow& row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto lse_of = [&](int part) {
    return part < row.merge.num_partials ? partial_lse[row.partial_row(part)] : -INFINITY;
  };
  const float own = lse_of(lane);
  PartWeights weights{.largest = own};
#pragma unroll 1
  for (int p = lane + kWarp; p < row.merge.num_partials; p += kWarp) {
    weights.largest = fmaxf(weights.largest, lse_of(p));
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    weights.largest = fmaxf(weights.largest, __shfl_xor_sync(kAllLanes, weights.largest, mask));
  }
  weights.sum = weights.of_lane = weights.of(own);
#pragma unroll 1
  for (int p = lane + kWarp; p < row.merge.num_partials; p += kWarp) {
    weights.sum += weights.of(lse_of(p));
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    weights.sum += __shfl_xor_sync(kAllLanes, weights.sum, mask);
  }
  return weights;
}

/// Four columns, or the first `columns` of them and zeros. `kIsWhole`: all four or none.
template <bool kIsWhole>
__device__ float4 load_columns(const float* from, int32_t columns) {
  if constexpr (kIsWhole) return columns > 0 ? *reinterpret_cast<const float4*>(from) : float4{};
  const auto value = [&](int v) { return v < columns ? from[v] : 0.0F; };
  return {value(0), value(1), value(2), value(3)};
}

/// The first `count` of four elements.
template <class T>
__device__ void store_columns(T* to, float4 value, int32_t count) {
  struct alignas(kValues * sizeof(T)) Columns {
    T of[kValues];
  };
  const Columns columns{from_float<T>(value.x), from_float<T>(value.y), from_float<T>(value.z),
                        from_float<T>(value.w)};
  if (count >= kValues && reinterpret_cast<uintptr_t>(to) % sizeof(Columns) == 0) {
    *reinterpret_cast<Columns*>(to) = columns;
    return;
  }
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    if (v < count) to[v] = columns.of[v];
  }
}

__device__ void store_columns(const AttentionParams& tensors, int64_t at, float4 value,
                              int32_t count) {
  switch (tensors.geometry.dtype) {
    case DType::kBFloat16:
      return store_columns(static_cast<__nv_bfloat16*>(tensors.out) + at, value, count);
    case DType::kFloat16:
      return store_columns(static_cast<__half*>(tensors.out) + at, value, count);
    default:
      return store_columns(static_cast<float*>(tensors.out) + at, value, count);
  }
}

__device__ void add_weighted(float4& sum, float weight, float4 value) {
  sum.x = fmaf(weight, value.x, sum.x);
  sum.y = fmaf(weight, value.y, sum.y);
  sum.z = fmaf(weight, value.z, sum.z);
  sum.w = fmaf(weight, value.w, sum.w);
}

__device__ float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

/// Four columns of parts `first` to first + 7 of a row, or up to its last, weighed and added up in
/// order.
template <bool kIsWhole>
__device__ float4 add_eight(const AttentionParams& tensors, const MergedRow& row,
                            const PartWeights& weights, int first, int32_t column) {
  const int32_t rank = tensors.geometry.kv_lora_rank;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int count = row.merge.num_partials - first;
  const int64_t stride = int64_t{row.merge.num_rows} * rank;
  const float* from = tensors.partial_out + row.partial_row(first) * rank + column;
  float4 parts[kEight];
#pragma unroll
  for (int i = 0; i < kEight; ++i, from += stride) {
    parts[i] = i < count ? load_columns<kIsWhole>(from, rank - column) : float4{};
  }
  float of_lane = weights.of_lane;
  if (first >= kWarp) {
    const int part = first + lane % kEight;
    of_lane = lane % kEight < count ? weights.of(tensors.partial_lse[row.partial_row(part)]) : 0.0F;
  }
  float4 sum{};
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const float weight = __shfl_sync(kAllLanes, of_lane, first % kWarp + i);
    if (weight == 0) parts[i] = {};  // it may hold anything
    add_weighted(sum, weight, parts[i]);
  }
  return sum;
}

/// `kIsWhole`: the rank is a multiple of kValues.
template <bool kIsWhole>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    merge_partials_kernel(const __grid_constant__ KernelParams params) {
  __shared__ Shared shared;
  const PlanView plan = params.image.view(params.plan);
  if (plan.num_merges == 0) return;
  const AttentionParams& tensors = params.tensors;
  const int32_t rank = tensors.geometry.kv_lora_rank;
  // 32 bits hold every item: a plan has at most 2^30 merged rows, and where a row has several items
  // each stands for 512 bytes of partial results at least.
  const uint32_t ranges = (rank + kColumns - 1) / kColumns;
  const uint32_t num_items = static_cast<uint32_t>(plan.num_merged_rows) * ranges;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;

  // A team takes neighbouring items, which share rows.
  const bool by_block = num_items <= gridDim.x;
  const int team_warps = by_block ? kWarps : 1;
  const int member = by_block ? warp : 0;
  const uint32_t num_teams = gridDim.x * (kWarps / team_warps);
  const uint32_t items_of_team = (num_items + num_teams - 1) / num_teams;
  const uint32_t team = by_block ? blockIdx.x : blockIdx.x * kWarps + warp;
  const uint32_t end = min((team + 1) * items_of_team, num_items);
  MergedRow row;
#pragma unroll 1
  for (uint32_t item = team * items_of_team; item < end;) {
    row.find(plan, item / ranges);
    const auto first_range = static_cast<int32_t>(item - row.index * ranges);
    const auto end_range = static_cast<int32_t>(min(ranges, first_range + (end - item)));
    item += end_range - first_range;
    if (row.merge.request >= params.num_requests) continue;
    const RowPlace at = place_of(plan, tensors.geometry.num_heads, row.merge.request,
                                 row.merge.row_begin + row.row_in_merge());
    const int64_t out_at = at.token * tensors.out_token_stride + at.head * tensors.out_head_stride;
    const PartWeights weights = weigh_parts(tensors.partial_lse, row);
    const float inverse = weights.sum == 0 ? 0.0F : 1 / weights.sum;
    const int eights = (row.merge.num_partials + kEight - 1) / kEight;
#pragma unroll 1
    for (int32_t range = first_range; range < end_range; ++range) {
      const int32_t column = range * kColumns + lane * kValues;
      float4 total{};
#pragma unroll 1
      for (int eight = member; eight < eights; eight += team_warps) {
        const float4 sum = add_eight<kIsWhole>(tensors, row, weights, eight * kEight, column);
        if (by_block) shared.sums[eight][lane] = sum;
        total = total + sum;
      }
      if (by_block) {
        __syncthreads();  // a block has one item at most
        if (warp != 0) return;
        total = {};
#pragma unroll 1
        for (int eight = 0; eight < eights; ++eight) total = total + shared.sums[eight][lane];
      }
      store_columns(tensors, out_at + column,
                    {total.x * inverse, total.y * inverse, total.z * inverse, total.w * inverse},
                    rank - column);
    }
    if (lane == 0 && first_range == 0) write_lse(tensors, plan, at, weights.natural_lse());
  }
}

using Kernel = void (*)(KernelParams);

Kernel kernel_of(const Geometry& geometry) {
  return geometry.kv_lora_rank % kValues == 0 ? &merge_partials_kernel<true>
                                              : &merge_partials_kernel<false>;
}

}  // namespace

void launch_merge(const AttentionLaunch& launch, Stream stream) {
  const int num_blocks = kBlocksPerSm * device_limits(launch.device.index).num_sms;
  kernel_of(launch.params
                .geometry)<<<num_blocks, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(
      kernel_params(launch));
  check_launch("merge_partials_kernel");
}

void prepare_merge(const Geometry& geometry) {
  cudaFuncAttributes attributes;  // loads the kernel
  MLA_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel_of(geometry)));
}

}  // namespace mla::cuda
