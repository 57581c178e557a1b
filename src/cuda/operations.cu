#include <algorithm>
#include <array>
#include <string>

#include "cuda/device_guard.hpp"
#include "cuda/error.hpp"
#include "cuda/launch.hpp"
#include "cuda/numbers.cuh"
#include "cuda/operations.hpp"
#include "mla/error.hpp"

namespace mla::cuda {
namespace {

using device::LayerRows;
using device::PoolPages;
using device::SourceRows;

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarpsPerBlock = kThreads / kWarp;
constexpr int64_t kMaxBlocks = 1 << 20;

unsigned blocks_for(int64_t items, int64_t items_per_block) {
  return static_cast<unsigned>(
      std::clamp<int64_t>((items + items_per_block - 1) / items_per_block, 1, kMaxBlocks));
}

/// Part of a list as it travels inside a launch.
template <class T, int kCapacity>
struct ListPart {
  T values[kCapacity];
};
using SlotPart = ListPart<int64_t, 2048>;
using CopyPart = ListPart<PageCopy, 1024>;

/// Copies with as many threads as there are between `thread` and `num_threads`, in the widest units
/// that both addresses and the length allow.
template <class Unit>
__device__ void copy_units(std::byte* to, const std::byte* from, int64_t bytes, int64_t thread,
                           int64_t num_threads) {
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t i = thread; i < count; i += num_threads) {
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  }
}

__device__ void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes, int64_t thread,
                           int64_t num_threads) {
  const uint64_t low_bits = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) |
                            static_cast<uint64_t>(bytes);
  if (low_bits % 16 == 0) {
    copy_units<uint4>(to, from, bytes, thread, num_threads);
  } else if (low_bits % 4 == 0) {
    copy_units<uint32_t>(to, from, bytes, thread, num_threads);
  } else {
    copy_units<uint16_t>(to, from, bytes, thread, num_threads);
  }
}

// One warp a row.
__device__ void scatter(const LayerRows& layer, const int64_t* slots, int64_t num_rows,
                        const SourceRows& rows) {
  const int64_t lane = threadIdx.x % kWarp;
  const int64_t num_warps = int64_t{gridDim.x} * kWarpsPerBlock;
  const int64_t row_bytes = layer.ckv_bytes + layer.kpe_bytes;
  for (int64_t row = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarp; row < num_rows;
       row += num_warps) {
    const int64_t slot = slots[row];
    if (slot < 0 || slot >= layer.num_slots) continue;
    std::byte* target = layer.data + slot * row_bytes;
    copy_bytes(target, rows.ckv + row * rows.ckv_stride, layer.ckv_bytes, lane, kWarp);
    if (layer.kpe_bytes > 0) {
      copy_bytes(target + layer.ckv_bytes, rows.kpe + row * rows.kpe_stride, layer.kpe_bytes, lane,
                 kWarp);
    }
  }
}

__global__ void scatter_rows_kernel(LayerRows layer, const __grid_constant__ SlotPart slots,
                                    int num_rows, SourceRows rows) {
  scatter(layer, slots.values, num_rows, rows);
}

__global__ void scatter_rows_at_kernel(LayerRows layer, const int64_t* slots, int64_t num_rows,
                                       SourceRows rows) {
  scatter(layer, slots, num_rows, rows);
}

__global__ void gather_rows_kernel(LayerRows layer, const __grid_constant__ SlotPart slots,
                                   int num_rows, std::byte* rows, int64_t row_stride_bytes) {
  const int64_t row_bytes = layer.ckv_bytes + layer.kpe_bytes;
  const int64_t row = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarp;
  if (row >= num_rows || slots.values[row] < 0) return;
  copy_bytes(rows + row * row_stride_bytes, layer.data + slots.values[row] * row_bytes, row_bytes,
             threadIdx.x % kWarp, kWarp);
}

// blockIdx: slice of the page, layer, copy.
__global__ void copy_pages_kernel(PoolPages pool, const __grid_constant__ CopyPart copies) {
  const PageCopy copy = copies.values[blockIdx.z];
  std::byte* layer = pool.data + int64_t{blockIdx.y} * pool.layer_bytes;
  copy_bytes(layer + int64_t{copy.to} * pool.page_bytes,
             layer + int64_t{copy.from} * pool.page_bytes, pool.page_bytes,
             int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);
}

// One block a request.
__global__ void select_last_rows_kernel(const int32_t* qo_indptr, const std::byte* hidden,
                                        int64_t hidden_stride, std::byte* out, int64_t out_stride,
                                        int64_t row_bytes, int64_t num_rows) {
  for (int64_t i = blockIdx.x; i < num_rows; i += gridDim.x) {
    const int64_t last = int64_t{qo_indptr[i + 1]} - 1;
    std::byte* row = out + i * out_stride;
    if (last >= qo_indptr[i]) {
      copy_bytes(row, hidden + last * hidden_stride, row_bytes, threadIdx.x, kThreads);
    } else {
      for (int64_t b = threadIdx.x; b < row_bytes; b += kThreads) row[b] = std::byte{0};
    }
  }
}

constexpr int kMaxStates = 256;

/// A [T, H, ...] tensor of any strides, in elements.
struct RowsOf {
  void* data;
  int64_t token_stride, head_stride;
  DType dtype;

  __device__ int64_t at(int64_t token, int64_t head) const {
    return token * token_stride + head * head_stride;
  }
};

struct MergeParams {
  RowsOf out;
  RowsOf lse;  // null data where it is not wanted
  int64_t num_rows, num_heads, columns;
  bool base_two;
  int num_states;
  RowsOf state_out[kMaxStates];
  RowsOf state_lse[kMaxStates];
};

// One block a row. The arithmetic of cpu/merge_rows.hpp, in the same order.
__global__ void merge_states_kernel(const __grid_constant__ MergeParams params) {
  __shared__ double lses[kMaxStates];
  __shared__ double powers[kMaxStates];
  const auto power = [&](double x) { return params.base_two ? exp2(x) : exp(x); };
  for (int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
    const int64_t token = row / params.num_heads;
    const int64_t head = row % params.num_heads;
    for (int i = threadIdx.x; i < params.num_states; i += kThreads) {
      const RowsOf& lse = params.state_lse[i];
      lses[i] = static_cast<const float*>(lse.data)[lse.at(token, head)];
    }
    __syncthreads();
    double largest = -INFINITY;
    for (int i = 0; i < params.num_states; ++i) {
      if (lses[i] > largest || isnan(lses[i])) largest = lses[i];
      if (isnan(largest)) break;
    }
    const bool is_empty = largest == -INFINITY;
    for (int i = threadIdx.x; i < params.num_states; i += kThreads) {
      powers[i] = is_empty ? 0 : power(lses[i] - largest);
    }
    __syncthreads();
    double total = 0;
    for (int i = 0; i < params.num_states; ++i) total += powers[i];

    for (int64_t c = threadIdx.x; c < params.columns; c += kThreads) {
      double sum = 0;
      for (int i = 0; i < params.num_states; ++i) {
        if (lses[i] == -INFINITY) continue;
        const RowsOf& part = params.state_out[i];
        sum += powers[i] / total *
               static_cast<double>(load_as_float(part.data, part.dtype, part.at(token, head) + c));
      }
      store_float(static_cast<float>(sum), params.out.data, params.out.dtype,
                  params.out.at(token, head) + c);
    }
    if (threadIdx.x == 0 && params.lse.data != nullptr) {
      static_cast<float*>(params.lse.data)[params.lse.at(token, head)] =
          is_empty ? -INFINITY
                   : static_cast<float>(largest + (params.base_two ? log2(total) : log(total)));
    }
    __syncthreads();  // the next row writes lses
  }
}

template <class T, int Rank>
RowsOf rows_of(const TensorView<T, Rank>& tensor) {
  return {.data = const_cast<void*>(static_cast<const void*>(tensor.data)),
          .token_stride = tensor.stride[0],
          .head_stride = tensor.stride[1],
          .dtype = tensor.dtype};
}

/// Calls fn(part, count) for runs of `list` that fit in one launch.
template <class Part, class T, class Fn>
void for_each_part(std::span<const T> list, const Fn& fn) {
  constexpr size_t kCapacity = std::extent_v<decltype(Part::values)>;
  Part part;
  for (size_t begin = 0; begin < list.size(); begin += kCapacity) {
    const auto values = list.subspan(begin, std::min(kCapacity, list.size() - begin));
    std::copy(values.begin(), values.end(), part.values);
    fn(part, static_cast<int>(values.size()), static_cast<int64_t>(begin));
  }
}

// The length of the longest run of copies from the front that can be done at once: none writes a
// page that another one touches.
size_t independent_run(std::span<const PageCopy> copies, size_t capacity) {
  for (size_t i = 1; i < std::min(copies.size(), capacity); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (copies[i].to == copies[j].to || copies[i].to == copies[j].from ||
          copies[i].from == copies[j].to) {
        return i;
      }
    }
  }
  return std::min(copies.size(), capacity);
}

}  // namespace

void CudaOperations::prepare() {
  const DeviceGuard guard(index_);
  const auto load = [](auto* kernel) {
    cudaFuncAttributes ignored{};
    check(cudaFuncGetAttributes(&ignored, reinterpret_cast<const void*>(kernel)),
          "cudaFuncGetAttributes", "prepare");
  };
  load(&scatter_rows_kernel);
  load(&scatter_rows_at_kernel);
  load(&gather_rows_kernel);
  load(&copy_pages_kernel);
  load(&select_last_rows_kernel);
  load(&merge_states_kernel);
}

void CudaOperations::scatter_rows(const LayerRows& layer, std::span<const int64_t> slots,
                                  const SourceRows& rows, Stream stream) {
  const DeviceGuard guard(index_);
  for_each_part<SlotPart>(slots, [&](const SlotPart& part, int count, int64_t begin) {
    const SourceRows from{.ckv = rows.ckv + begin * rows.ckv_stride,
                          .kpe = rows.kpe == nullptr ? nullptr : rows.kpe + begin * rows.kpe_stride,
                          .ckv_stride = rows.ckv_stride,
                          .kpe_stride = rows.kpe_stride};
    launch_kernel("scatter_rows_kernel", scatter_rows_kernel,
                  {.count = blocks_for(count, kWarpsPerBlock), .threads = kThreads}, stream, layer,
                  part, count, from);
  });
}

void CudaOperations::scatter_rows_at(const LayerRows& layer, const int64_t* slots, int64_t num_rows,
                                     const SourceRows& rows, Stream stream) {
  if (num_rows == 0) return;
  const DeviceGuard guard(index_);
  launch_kernel("scatter_rows_at_kernel", scatter_rows_at_kernel,
                {.count = blocks_for(num_rows, kWarpsPerBlock), .threads = kThreads}, stream, layer,
                slots, num_rows, rows);
}

void CudaOperations::gather_rows(const LayerRows& layer, std::span<const int64_t> slots,
                                 std::byte* rows, int64_t row_stride_bytes, Stream stream) {
  const DeviceGuard guard(index_);
  for_each_part<SlotPart>(slots, [&](const SlotPart& part, int count, int64_t begin) {
    launch_kernel("gather_rows_kernel", gather_rows_kernel,
                  {.count = blocks_for(count, kWarpsPerBlock), .threads = kThreads}, stream, layer,
                  part, count, rows + begin * row_stride_bytes, row_stride_bytes);
  });
}

void CudaOperations::copy_pages(const PoolPages& pool, std::span<const PageCopy> copies,
                                Stream stream) {
  constexpr size_t kCapacity = 1024;
  constexpr int64_t kBytesPerThread = 64;
  constexpr int64_t kMaxSlices = 64;
  constexpr int32_t kMaxLayers = 65535;  // of one launch
  const DeviceGuard guard(index_);
  const auto slices = static_cast<unsigned>(
      std::min<int64_t>(blocks_for(pool.page_bytes, kThreads * kBytesPerThread), kMaxSlices));
  CopyPart part;
  while (!copies.empty()) {
    const auto run = copies.first(independent_run(copies, kCapacity));
    std::copy(run.begin(), run.end(), part.values);
    for (int32_t layer = 0; layer < pool.num_layers; layer += kMaxLayers) {
      PoolPages from = pool;
      from.data += layer * pool.layer_bytes;
      const dim3 grid(slices, static_cast<unsigned>(std::min(pool.num_layers - layer, kMaxLayers)),
                      static_cast<unsigned>(run.size()));
      launch_kernel("copy_pages_kernel", copy_pages_kernel, {.count = grid, .threads = kThreads},
                    stream, from, part);
    }
    copies = copies.subspan(run.size());
  }
}

void CudaOperations::select_last_rows(const int32_t* qo_indptr, const ConstTensor<2>& hidden,
                                      const Tensor<2>& out, Stream stream) {
  const DeviceGuard guard(index_);
  const int64_t item = size_of(out.dtype);
  launch_kernel("select_last_rows_kernel", select_last_rows_kernel,
                {.count = blocks_for(out.shape[0], 1), .threads = kThreads}, stream, qo_indptr,
                static_cast<const std::byte*>(hidden.data), hidden.stride[0] * item,
                static_cast<std::byte*>(out.data), out.stride[0] * item, out.shape[1] * item,
                out.shape[0]);
}

void CudaOperations::merge_states(std::span<const PartialState> states, const Tensor<3>& out,
                                  const TensorView<float, 2>& lse, LseBase base, Executor*,
                                  Stream stream) {
  if (states.size() > kMaxStates) {
    throw_invalid({.what = "states.size()",
                   .where = "merge_states",
                   .expected = "at most " + std::to_string(kMaxStates) + " on a CUDA device",
                   .got = std::to_string(states.size())});
  }
  const DeviceGuard guard(index_);
  MergeParams params{.out = rows_of(out),
                     .lse = rows_of(lse),
                     .num_rows = out.shape[0] * out.shape[1],
                     .num_heads = out.shape[1],
                     .columns = out.shape[2],
                     .base_two = base == LseBase::kTwo,
                     .num_states = static_cast<int>(states.size())};
  for (size_t i = 0; i < states.size(); ++i) {
    params.state_out[i] = rows_of(states[i].out);
    params.state_lse[i] = rows_of(states[i].lse);
  }
  launch_kernel("merge_states_kernel", merge_states_kernel,
                {.count = blocks_for(params.num_rows, 1), .threads = kThreads}, stream, params);
}

}  // namespace mla::cuda
