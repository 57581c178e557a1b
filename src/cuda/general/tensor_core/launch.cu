#include <initializer_list>

#include "cuda/device_guard.hpp"
#include "cuda/device_limits.hpp"
#include "cuda/error.hpp"
#include "cuda/general/tensor_core.hpp"
#include "cuda/general/tensor_core/collect.cuh"
#include "cuda/launch.hpp"
#include "cuda/merge_partials.hpp"

namespace mla::cuda::general {
namespace {

using namespace tensor_core;

// One block of 12 warps computes a tile: up to 64 rows of one request against a range of its keys,
// a block of keys at a time. While the score warps are at block i, the value warps are at i - 1:
//
//                 meet                                meet, where several warps share a row
//   score warps     scores = queries x keys; maxima     weights exp2(score - reference) of block i
//   value warps     out = out * factor + weights of     load the block that takes its place in the
//                   block i - 1 x values                ring (one step later without this meeting)
//
// At the end the value warps write out / sum, to the output or the partial results.
// docs/kernels/cuda_general.md has costs and measurements.
template <class T, int kRowTiles, int kColumnTiles>
__device__ void attend(const Params& params, const plan::Tile& tile, const Shared& shared) {
  using ThisTile = Tile<T, TileTraits<kRowTiles, kColumnTiles>>;
  const ThisTile t(params, tile, shared);
  if (threadIdx.x < kScoreWarps * kWarp) {
    score_tile(t);
  } else {
    collect_tile(t);
  }
}

template <class T, int kColumnTiles>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) std::byte memory[];
  const Shared shared(memory, params.shape);
  if (params.shape.has_padding) {  // no load writes it
    for (int at = static_cast<int>(threadIdx.x) * 16; at < params.shape.weights_at;
         at += kThreads * 16) {
      *reinterpret_cast<uint4*>(memory + at) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
  }
  const PlanView plan = params.launch.image.view(params.launch.plan);
  const int end = plan.worker_indptr[blockIdx.x + 1];
  for (int i = plan.worker_indptr[blockIdx.x]; i < end; ++i) {
    const plan::Tile& tile = plan.tiles[i];
    if (tile.request >= params.launch.num_requests) continue;
    if (tile.num_rows <= kRowTile) {
      attend<T, 1, kColumnTiles>(params, tile, shared);
    } else if (tile.num_rows <= 2 * kRowTile) {
      attend<T, 2, kColumnTiles>(params, tile, shared);
    } else {
      attend<T, 4, kColumnTiles>(params, tile, shared);
    }
  }
}

using Kernel = void (*)(Params);

template <class T>
Kernel kernel_of_columns(int32_t value_columns) {
  if (value_columns == 128) return &attention_kernel<T, 2>;
  return value_columns == 256 ? &attention_kernel<T, 4> : &attention_kernel<T, 8>;
}

Kernel kernel_of(const Geometry& geometry, const TileShape& shape) {
  return geometry.dtype == DType::kBFloat16 ? kernel_of_columns<__nv_bfloat16>(shape.value_columns)
                                            : kernel_of_columns<__half>(shape.value_columns);
}

TileShape shape_of(const KernelQuery& query) {
  return choose_tile_shape(query.geometry, device_limits(query.device.index).smem_per_block);
}

const char* refuses(const KernelQuery& query) {
  if (query.geometry.dtype == DType::kFloat32) return "tensor cores round fp32";
  if (query.geometry.kv_lora_rank > kMaxRank) return "kv_lora_rank is above 512";
  if (device_limits(query.device.index).compute_capability < 80) {
    return "the device's compute capability is below 8.0";
  }
  if (shape_of(query).tile_rows == 0) {
    return "a tile does not fit in the shared memory of a block";
  }
  return nullptr;
}

int32_t num_workers(const KernelQuery& query) { return device_limits(query.device.index).num_sms; }

// An estimate for every shape and card: measured costs made worse plans (docs/planner.md).
plan::CostModel cost_model(const KernelQuery& query) {
  const TileShape shape = shape_of(query);
  const int32_t keys = block_keys(shape.value_columns, shape.tile_rows);
  constexpr double kStepNs = 300;         // of any block
  constexpr double kBytesPerNs = 34;      // of keys
  constexpr double kMultiplyAdds = 1900;  // a nanosecond
  const double columns = shape.width + query.geometry.kv_lora_rank;
  return {.tile_rows = shape.tile_rows,
          .block_tokens = keys,
          .split_align = 1,
          .tile_ns = 2500,
          .block_ns = kStepNs + keys * shape.row_bytes / kBytesPerNs,
          .block_row_ns = keys * columns / kMultiplyAdds,
          .partial_row_ns = 0.1 * query.geometry.kv_lora_rank,
          .merge_ns = 4000,
          .shares_keys = true};
}

void prepare(const KernelQuery& query) {
  const DeviceGuard guard(query.device.index);
  const TileShape shape = shape_of(query);
  MLA_CUDA_CHECK(cudaFuncSetAttribute(
      reinterpret_cast<const void*>(kernel_of(query.geometry, shape)),
      cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.smem_bytes)));
  prepare_merge(query.geometry);
}

/// Whether rows at these places can be read or written in units of so many bytes.
bool in_units(const void* data, size_t bytes, std::initializer_list<int64_t> elements) {
  bool whole = reinterpret_cast<uintptr_t>(data) % bytes == 0;
  for (const int64_t count : elements)
    whole = whole && count * 2 % static_cast<int64_t>(bytes) == 0;
  return whole;
}

void launch(const AttentionLaunch& launch, Stream stream) {
  const AttentionParams& t = launch.params;
  const int64_t rank = t.geometry.kv_lora_rank;
  const int64_t rope = t.geometry.qk_rope_head_dim;
  Params params{.launch = kernel_params(launch),
                .shape = shape_of({t.geometry, t.cache, launch.device}),
                .by_page_size = Divider(t.geometry.page_size)};
  params.wide_queries =
      in_units(t.q_nope, 16, {rank, t.q_nope_token_stride, t.q_nope_head_stride}) &&
      (rope == 0 || in_units(t.q_pe, 16, {rope, t.q_pe_token_stride, t.q_pe_head_stride}));
  params.wide_cache = in_units(t.ckv, 16, {rank, t.cache.ckv_page, t.cache.ckv_row}) &&
                      (rope == 0 || in_units(t.kpe, 16, {rope, t.cache.kpe_page, t.cache.kpe_row}));
  params.paired_out = in_units(t.out, 4, {rank, t.out_token_stride, t.out_head_stride});
  const DeviceGuard guard(launch.device.index);
  launch_kernel("cuda_tensor_core", kernel_of(t.geometry, params.shape),
                {.count = static_cast<unsigned>(launch.num_workers),
                 .threads = kThreads,
                 .dynamic_bytes = params.shape.smem_bytes},
                stream, params);
  if (launch.may_split) launch_merge(launch, stream);
}

}  // namespace

const AttentionImpl kTensorCoreImpl = {.name = "cuda_tensor_core",
                                       .capturable = true,
                                       .rounds_probabilities = true,
                                       .refuses = &refuses,
                                       .cost_model = &cost_model,
                                       .num_workers = &num_workers,
                                       .prepare = &prepare,
                                       .launch = &launch};

}  // namespace mla::cuda::general
