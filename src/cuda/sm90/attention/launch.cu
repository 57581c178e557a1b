#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "cuda/cost_table.hpp"
#include "cuda/device_guard.hpp"
#include "cuda/device_limits.hpp"
#include "cuda/error.hpp"
#include "cuda/merge_partials.hpp"
#include "cuda/sm90/attention/kernel.cuh"
#include "cuda/sm90/attention/launch.hpp"

namespace mla::cuda::sm90 {
namespace {

constexpr int32_t kRank = 512, kRope = 64;
constexpr int32_t kRows = 64, kKeys = 64;
constexpr int64_t kChunkElements = 8;  // 16 bytes

const char* refuses(const KernelQuery& query) {
  const Geometry& geometry = query.geometry;
  if (geometry.dtype == DType::kFloat32) return "it has tensor cores for bf16 and fp16 only";
  if (geometry.kv_lora_rank != kRank) return "it is for kv_lora_rank 512";
  if (geometry.qk_rope_head_dim != kRope && geometry.qk_rope_head_dim != 0) {
    return "it is for qk_rope_head_dim 64 or 0";
  }
  const CacheStrides& strides = query.strides;
  bool aligned = strides.ckv_page % kChunkElements == 0 && strides.ckv_row % kChunkElements == 0;
  if (geometry.qk_rope_head_dim > 0) {
    aligned =
        aligned && strides.kpe_page % kChunkElements == 0 && strides.kpe_row % kChunkElements == 0;
  }
  if (!aligned) return "it needs cache strides that are multiples of 8 elements";
  if (device_limits(query.device.index).compute_capability != 90) {
    return "it needs compute capability 9.0";
  }
  return nullptr;
}

int32_t blocks_per_worker(const Geometry& geometry) { return geometry.num_heads > kRows ? 2 : 1; }

int32_t num_workers(const KernelQuery& query) {
  return device_limits(query.device.index).num_sms / blocks_per_worker(query.geometry);
}

// The nanoseconds are for cards that the table does not have.
plan::CostModel cost_model(const KernelQuery& query) {
  return calibrated({.tile_rows = kRows * blocks_per_worker(query.geometry),
                     .block_tokens = kKeys,
                     .split_align = kKeys,
                     .tile_ns = 4000,
                     .block_ns = 2100,
                     .block_row_ns = 0,
                     .partial_row_ns = 20,
                     .merge_ns = 5000,
                     .shares_keys = true},
                    "sm90_dense", query);
}

using Kernel = void (*)(AttentionArgs);

template <class T, int kRopeColumns>
Kernel kernel_for(int32_t blocks) {
  return blocks == 2 ? &attention_kernel<AttentionTraits<T, kRopeColumns, 2>>
                     : &attention_kernel<AttentionTraits<T, kRopeColumns, 1>>;
}

template <class T>
Kernel kernel_for(int32_t rope, int32_t blocks) {
  return rope == 0 ? kernel_for<T, 0>(blocks) : kernel_for<T, kRope>(blocks);
}

Kernel kernel_for(const Geometry& geometry) {
  const int32_t rope = geometry.qk_rope_head_dim, blocks = blocks_per_worker(geometry);
  return geometry.dtype == DType::kBFloat16 ? kernel_for<__nv_bfloat16>(rope, blocks)
                                            : kernel_for<__half>(rope, blocks);
}

using WidestTraits = AttentionTraits<__half, kRope, 1>;
constexpr int kSharedBytes = sizeof(SharedStorage<WidestTraits>);

bool is_aligned(const void* data, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Of the driver, which this library does not link to; null where it has none.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    constexpr unsigned kCudaVersion = 12000;  // the first that has it
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kCudaVersion,
                                           cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)", "encode_tiled");
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(entry) : nullptr;
  }();
  return function;
}

void prepare(const KernelQuery& query) {
  const DeviceGuard guard(query.device.index);
  MLA_CUDA_CHECK(cudaFuncSetAttribute(kernel_for(query.geometry),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  encode_tiled();
  prepare_merge(query.geometry);
}

// A box has up to 64 rows of a page: a step's keys are of one page, or of several whole ones.
constexpr int32_t kAtomRows = WidestTraits::kAtomRows;
bool fits_boxes(int32_t page_size) {
  return page_size % kAtomRows == 0 && (page_size % kKeys == 0 || kKeys % page_size == 0);
}

/// Rows of 64-column strips of a paged cache, by eight; a box has `box_strips` strips of its rows.
bool describe_boxes(const Geometry& geometry, const void* data, int64_t page_stride,
                    int64_t row_stride, int32_t strips, int32_t box_strips, CUtensorMap& boxes) {
  constexpr cuuint32_t kColumns = 64, kStripBytes = 128;
  const int32_t box_rows = std::min(geometry.page_size, kKeys);
  const cuuint64_t shape[] = {kColumns, kAtomRows, static_cast<cuuint64_t>(strips),
                              static_cast<cuuint64_t>(geometry.page_size / kAtomRows),
                              cuuint64_t{kMaxPoolPages}};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride) * 2, kStripBytes,
                                static_cast<cuuint64_t>(row_stride) * kAtomRows * 2,
                                static_cast<cuuint64_t>(page_stride) * 2};
  const cuuint32_t box[] = {kColumns, kAtomRows, static_cast<cuuint32_t>(box_strips),
                            static_cast<cuuint32_t>(box_rows / kAtomRows), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode_tiled()(&boxes,
                     geometry.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                        : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                     5, const_cast<void*>(data), shape, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS;
}

// The copy engine where boxes fit the pages, else the widest accesses that are aligned.
void choose_key_loads(const AttentionParams& params, AttentionArgs& args) {
  const Geometry& geometry = params.geometry;
  const CacheStrides& strides = params.cache;
  const bool has_rope = geometry.qk_rope_head_dim > 0;
  const bool aligned = is_aligned(params.ckv, 16) && (!has_rope || is_aligned(params.kpe, 16));
  args.key_loads = aligned ? KeyLoads::kChunks : KeyLoads::kElements;
  if (!aligned || !fits_boxes(geometry.page_size) || encode_tiled() == nullptr) return;
  if (describe_boxes(geometry, params.ckv, strides.ckv_page, strides.ckv_row, 8, 4,
                     args.ckv_boxes) &&
      (!has_rope || describe_boxes(geometry, params.kpe, strides.kpe_page, strides.kpe_row, 1, 1,
                                   args.kpe_boxes))) {
    args.key_loads = KeyLoads::kBoxes;
  }
}

AttentionArgs args_of(const AttentionLaunch& launch) {
  const AttentionParams& params = launch.params;
  const bool has_rope = params.geometry.qk_rope_head_dim > 0;
  AttentionArgs args{kernel_params(launch)};
  const int32_t blocks = blocks_per_worker(params.geometry);
  choose_key_loads(params, args);
  args.is_cluster = blocks == 2 && args.key_loads == KeyLoads::kBoxes;
  const auto chunks = [](int64_t token_stride, int64_t head_stride, int64_t elements) {
    return token_stride % elements == 0 && head_stride % elements == 0;
  };
  args.queries_aligned =
      is_aligned(params.q_nope, 16) &&
      chunks(params.q_nope_token_stride, params.q_nope_head_stride, kChunkElements) &&
      (!has_rope || (is_aligned(params.q_pe, 16) &&
                     chunks(params.q_pe_token_stride, params.q_pe_head_stride, kChunkElements)));
  args.out_aligned = is_aligned(params.out, 8) &&
                     chunks(params.out_token_stride, params.out_head_stride, kChunkElements / 2);
  return args;
}

void launch(const AttentionLaunch& launch, Stream stream) {
  const DeviceGuard guard(launch.device.index);
  AttentionArgs args = args_of(launch);
  const auto num_blocks =
      static_cast<unsigned>(launch.num_workers * blocks_per_worker(launch.params.geometry));
  const Kernel kernel = kernel_for(launch.params.geometry);
  constexpr int kThreads = WidestTraits::kThreads;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {args.is_cluster ? 2U : 1U, 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  cudaLaunchConfig_t config{};
  config.gridDim = num_blocks;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = attributes;
  config.numAttrs = 2;
  const auto queue = [&](bool may_merge) {
    args.may_merge = may_merge;
    attributes[1].val.cooperative = may_merge ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args);
  };
  cudaError_t result = queue(launch.may_split);
  // A part of a card may run fewer blocks at a time than the card has multiprocessors.
  const bool blocks_can_meet = result != cudaErrorCooperativeLaunchTooLarge;
  if (!blocks_can_meet) {
    cudaGetLastError();  // no error of the caller's
    result = queue(false);
  }
  check(result, "cudaLaunchKernelEx", "sm90_dense");
  if (!blocks_can_meet) launch_merge(launch, stream);
}

}  // namespace

const AttentionImpl kDenseImpl = {.name = "sm90_dense",
                                  .capturable = true,
                                  .rounds_probabilities = true,
                                  .refuses = &refuses,
                                  .cost_model = &cost_model,
                                  .num_workers = &num_workers,
                                  .prepare = &prepare,
                                  .launch = &launch};

}  // namespace mla::cuda::sm90
