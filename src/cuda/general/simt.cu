#include <algorithm>

#include "cuda/device_guard.hpp"
#include "cuda/device_limits.hpp"
#include "cuda/error.hpp"
#include "cuda/general/simt.hpp"
#include "cuda/launch.hpp"
#include "cuda/merge_partials.hpp"
#include "cuda/numbers.cuh"
#include "cuda/rows.cuh"

// Any shape, in plain fp32 arithmetic. One block of 8 warps computes a tile: a few rows of one
// request against a range of its keys, 32 keys at a time.
//
//   score     each warp takes four keys: lanes share out the columns and add up
//   weigh     each warp takes a row: lanes are keys
//   collect   each thread takes columns of the values, for all rows
//
// Keys are read from global memory in place: nothing is assumed of widths or alignment.
namespace mla::cuda::general {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kBlockKeys = 32;
constexpr uint32_t kAllLanes = 0xffffffff;

/// Rows of a tile and columns of a thread: what one thread holds of the output.
struct Split {
  int32_t rows = 0;
  int32_t columns = 0;
};

// Queries of a tile take at most 48 KiB of shared memory.
constexpr int64_t kMaxQueryValues = 12288;

Split split_of(const Geometry& geometry) {
  if (geometry.kv_lora_rank <= 2 * kThreads && 8 * geometry.latent_width() <= kMaxQueryValues) {
    return {8, 2};
  }
  if (geometry.kv_lora_rank <= 8 * kThreads && 4 * geometry.latent_width() <= kMaxQueryValues) {
    return {4, 8};
  }
  return {1, 32};
}

/// Adds with the error of the last addition carried along, so that a long row of equal terms does
/// not drift. Source: Kahan 1965.
__device__ inline void add_exactly(float& sum, float& error, float value) {
  const float corrected = value - error;
  const float next = sum + corrected;
  error = (next - sum) - corrected;
  sum = next;
}

__device__ inline float max_over_warp(float value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, mask));
  }
  return value;
}
__device__ inline float sum_over_warp(float value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(kAllLanes, value, mask);
  return value;
}

template <int kRows>
struct Shared {
  float weights[kRows][kBlockKeys];  // scores, then weights
  float factors[kRows];
  float inverse_sums[kRows];
  int64_t ckv_at[kBlockKeys];  // elements
};

template <class T, int kRows, int kColumns>
struct Tile {
  const KernelParams& params;
  const PlanView& plan;
  const plan::Tile& tile;
  Shared<kRows>& shared;
  float* queries;  // [kRows][latent width]
  int warp = static_cast<int>(threadIdx.x) / kWarp;
  int lane = static_cast<int>(threadIdx.x) % kWarp;

  __device__ const AttentionParams& tensors() const { return params.tensors; }
  __device__ int rank() const { return tensors().geometry.kv_lora_rank; }
  __device__ int rope() const { return tensors().geometry.qk_rope_head_dim; }
  __device__ RowPlace place(int row) const {
    return place_of(plan, tensors().geometry.num_heads, tile.request, tile.row_begin + row);
  }

  __device__ void load_queries() const {
    const AttentionParams& t = tensors();
    const int width = rank() + rope();
    for (int row = 0; row < kRows; ++row) {
      const bool valid = row < tile.num_rows;
      const RowPlace at = place(valid ? row : 0);
      const T* nope = static_cast<const T*>(t.q_nope) + at.token * t.q_nope_token_stride +
                      at.head * t.q_nope_head_stride;
      const T* pe = static_cast<const T*>(t.q_pe) + at.token * t.q_pe_token_stride +
                    at.head * t.q_pe_head_stride;
      for (int c = static_cast<int>(threadIdx.x); c < width; c += kThreads) {
        float value = 0;
        if (valid) value = to_float(c < rank() ? nope[c] : pe[c - rank()]);
        queries[row * width + c] = value;
      }
    }
  }

  // Scores of the warp's keys for all rows.
  __device__ void score(int first_key, int num_keys) const {
    const AttentionParams& t = tensors();
    const int width = rank() + rope();
    const int32_t* pages = plan.kv_indices + plan.kv_indptr[tile.request];
    for (int key = warp; key < num_keys; key += kWarps) {
      const KeyPlace at = place_of_key(pages, first_key + key, t.geometry.page_size);
      const int64_t ckv_at = at.page * t.cache.ckv_page + at.slot * t.cache.ckv_row;
      const T* ckv = static_cast<const T*>(t.ckv) + ckv_at;
      const T* kpe =
          static_cast<const T*>(t.kpe) + at.page * t.cache.kpe_page + at.slot * t.cache.kpe_row;
      float sums[kRows] = {};
#pragma unroll 2
      for (int c = lane; c < width; c += kWarp) {
        const float value = to_float(c < rank() ? ckv[c] : kpe[c - rank()]);
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          sums[row] = fmaf(queries[row * width + c], value, sums[row]);
        }
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float sum = sum_over_warp(sums[row]);
        if (lane == 0) shared.weights[row][key] = sum;
      }
      if (lane == 0) shared.ckv_at[key] = ckv_at;
    }
  }
};

/// What the warp of a row knows of it.
struct RowState {
  float largest = -INFINITY;
  float sum = 0, sum_error = 0;
};

// Scores of the warp's row to weights.
template <class T, int kRows, int kColumns>
__device__ void weigh(const Tile<T, kRows, kColumns>& t, int first_key, int limit,
                      RowState& state) {
  if (t.warp >= kRows) return;
  const bool visible = first_key + t.lane < limit;
  const float score = visible ? t.shared.weights[t.warp][t.lane] * t.plan.sm_scale : -INFINITY;
  const float largest = fmaxf(state.largest, max_over_warp(score));
  const float base = largest == -INFINITY ? 0.0F : largest;  // no key seen yet
  const float weight = visible ? expf(score - base) : 0.0F;
  const float factor = expf(state.largest - base);
  state.largest = largest;
  state.sum *= factor;
  state.sum_error *= factor;
  add_exactly(state.sum, state.sum_error, sum_over_warp(weight));
  t.shared.weights[t.warp][t.lane] = weight;
  if (t.lane == 0) t.shared.factors[t.warp] = factor;
}

template <class T, int kRows, int kColumns>
__device__ void collect(const Tile<T, kRows, kColumns>& t, int num_keys,
                        float (&out)[kRows][kColumns], float (&errors)[kRows][kColumns]) {
  const T* ckv = static_cast<const T*>(t.tensors().ckv) + threadIdx.x;
  float sums[kRows][kColumns] = {};
#pragma unroll 2
  for (int key = 0; key < num_keys; ++key) {
    const T* values = ckv + t.shared.ckv_at[key];
    float weights[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) weights[row] = t.shared.weights[row][key];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (static_cast<int>(threadIdx.x) + c * kThreads >= t.rank()) break;
      const float value = to_float(values[c * kThreads]);
#pragma unroll
      for (int row = 0; row < kRows; ++row) sums[row][c] = fmaf(weights[row], value, sums[row][c]);
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float factor = t.shared.factors[row];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      out[row][c] *= factor;
      errors[row][c] *= factor;
      add_exactly(out[row][c], errors[row][c], sums[row][c]);
    }
  }
}

template <class T, int kRows, int kColumns>
__device__ void write(const Tile<T, kRows, kColumns>& t, const RowState& state,
                      const float (&out)[kRows][kColumns]) {
  const AttentionParams& tensors = t.tensors();
  if (t.warp < min(kRows, t.tile.num_rows) && t.lane == 0) {
    const float lse = state.sum == 0 ? -INFINITY : state.largest + logf(state.sum);
    t.shared.inverse_sums[t.warp] = state.sum == 0 ? 0.0F : 1 / state.sum;
    if (t.tile.partial_begin >= 0) {
      tensors.partial_lse[t.tile.partial_begin + t.warp] = lse;
    } else {
      write_lse(tensors, t.plan, t.place(t.warp), lse);
    }
  }
  __syncthreads();
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= t.tile.num_rows) break;
    const float inverse = t.shared.inverse_sums[row];
    const RowPlace at = t.place(row);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = static_cast<int>(threadIdx.x) + c * kThreads;
      if (column >= t.rank()) break;
      const float value = out[row][c] * inverse;
      if (t.tile.partial_begin >= 0) {
        tensors.partial_out[(t.tile.partial_begin + row) * t.rank() + column] = value;
      } else {
        static_cast<T*>(tensors.out)[at.token * tensors.out_token_stride +
                                     at.head * tensors.out_head_stride + column] =
            from_float<T>(value);
      }
    }
  }
}

template <class T, int kRows, int kColumns>
__device__ void attend(const Tile<T, kRows, kColumns>& t) {
  t.load_queries();
  int limit = 0;  // of the warp's row
  if (t.warp < min(kRows, t.tile.num_rows)) {
    limit = min(t.tile.kv_end, visible_keys(t.plan, t.tensors().geometry.num_heads, t.tile.request,
                                            t.tile.row_begin + t.warp));
  }
  RowState state;
  float out[kRows][kColumns] = {};
  float errors[kRows][kColumns] = {};
  __syncthreads();  // queries
  for (int first = t.tile.kv_begin; first < t.tile.kv_end; first += kBlockKeys) {
    const int num_keys = min(kBlockKeys, t.tile.kv_end - first);
    t.score(first, num_keys);
    __syncthreads();
    weigh(t, first, limit, state);
    __syncthreads();
    collect(t, num_keys, out, errors);
    __syncthreads();  // the next scores overwrite the weights
  }
  write(t, state, out);
  __syncthreads();  // the next tile overwrites the queries
}

template <class T, int kRows, int kColumns>
__global__ void __launch_bounds__(kThreads, 2)
    attention_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ float queries[];
  __shared__ Shared<kRows> shared;
  const PlanView plan = params.image.view(params.plan);
  const int end = plan.worker_indptr[blockIdx.x + 1];
  for (int i = plan.worker_indptr[blockIdx.x]; i < end; ++i) {
    const plan::Tile tile = plan.tiles[i];
    if (tile.request >= params.num_requests) continue;
    attend<T, kRows, kColumns>({params, plan, tile, shared, queries});
  }
}

using Kernel = void (*)(KernelParams);

template <class T>
Kernel kernel_of_split(const Split& split) {
  if (split.rows == 8) return &attention_kernel<T, 8, 2>;
  if (split.rows == 4) return &attention_kernel<T, 4, 8>;
  return &attention_kernel<T, 1, 32>;
}

Kernel kernel_of(const Geometry& geometry) {
  const Split split = split_of(geometry);
  switch (geometry.dtype) {
    case DType::kBFloat16:
      return kernel_of_split<__nv_bfloat16>(split);
    case DType::kFloat16:
      return kernel_of_split<__half>(split);
    default:
      return kernel_of_split<float>(split);
  }
}

size_t query_bytes(const Geometry& geometry) {
  return static_cast<size_t>(split_of(geometry).rows * geometry.latent_width()) * sizeof(float);
}

constexpr int32_t kBlocksPerSm = 2;

// The library has machine code, or PTX for the driver, from there on.
const char* refuses(const KernelQuery& query) {
  return device_limits(query.device.index).compute_capability < 80
             ? "the device's compute capability is below 8.0"
             : nullptr;
}

int32_t num_workers(const KernelQuery& query) {
  return device_limits(query.device.index).num_sms * kBlocksPerSm;
}

// Of an H200, from docs/kernels/cuda_general.md.
plan::CostModel cost_model(const KernelQuery& query) {
  const Geometry& geometry = query.geometry;
  const double columns = static_cast<double>(geometry.latent_width() + geometry.kv_lora_rank);
  constexpr double kMultiplyAdds = 25;  // a nanosecond, of one block
  return {.tile_rows = split_of(geometry).rows,
          .block_tokens = kBlockKeys,
          .split_align = 1,
          .tile_ns = 3000,
          .block_ns = kBlockKeys * columns / kMultiplyAdds,
          .block_row_ns = kBlockKeys * columns / kMultiplyAdds / 4,
          .partial_row_ns = 0.1 * geometry.kv_lora_rank,
          .merge_ns = 4000};
}

void prepare(const KernelQuery& query) {
  const DeviceGuard guard(query.device.index);
  MLA_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel_of(query.geometry)),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(query_bytes(query.geometry))));
  prepare_merge(query.geometry);
}

void launch(const AttentionLaunch& launch, Stream stream) {
  const DeviceGuard guard(launch.device.index);
  const Geometry& geometry = launch.params.geometry;
  launch_kernel("cuda_simt", kernel_of(geometry),
                {.count = static_cast<unsigned>(launch.num_workers),
                 .threads = kThreads,
                 .dynamic_bytes = query_bytes(geometry)},
                stream, kernel_params(launch));
  if (launch.may_split) launch_merge(launch, stream);
}

}  // namespace

const AttentionImpl kSimtImpl = {.name = "cuda_simt",
                                 .capturable = true,
                                 .refuses = &refuses,
                                 .cost_model = &cost_model,
                                 .num_workers = &num_workers,
                                 .prepare = &prepare,
                                 .launch = &launch};

}  // namespace mla::cuda::general
