#include <algorithm>

#include "cuda/device_guard.hpp"
#include "cuda/error.hpp"
#include "cuda/launch.hpp"
#include "cuda/numbers.cuh"
#include "layer/cuda/cublas.hpp"
#include "layer/cuda/operations.hpp"

// What stands between the products of a layer. Rows are fp32 as the products leave them; sums and
// angles are formed in double, as on the CPU. docs/kernels/layer_cuda.md.
namespace mla::layer::cuda {
namespace {

using mla::cuda::check;
using mla::cuda::DeviceGuard;
using mla::cuda::from_float;
using mla::cuda::launch_kernel;
using mla::cuda::to_float;

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 20;            // then blocks take several tokens
constexpr int64_t kUnitsPerBlock = 16 * kThreads;  // of turned queries

/// Which columns turn together, for kernels: unit i is the columns i * step and partner further on;
/// where nothing turns a unit is one column.
struct Turn {
  const double* frequencies;  // null where nothing turns
  double magnitude;
  int32_t width, num_units, step, partner;

  explicit Turn(const Rope& rope)
      : frequencies(rope.num_pairs() == 0 ? nullptr : rope.frequencies),
        magnitude(rope.magnitude),
        width(static_cast<int32_t>(rope.width)),
        num_units(frequencies == nullptr ? width : width / 2),
        step(rope.layout == RopeLayout::kInterleaved ? 2 : 1),
        partner(rope.layout == RopeLayout::kInterleaved ? 1 : width / 2) {}
};

/// cos and sin of a unit at a position.
__device__ float2 angle_of(const Turn& turn, int32_t position, int unit) {
  if (turn.frequencies == nullptr) return {1, 0};
  double sin = 0;
  double cos = 0;
  sincos(position * turn.frequencies[unit], &sin, &cos);
  return {static_cast<float>(cos * turn.magnitude), static_cast<float>(sin * turn.magnitude)};
}

template <class From, class To>
__device__ void turn_unit(const Turn& turn, const From* from, To* to, int unit, float2 angle) {
  if (turn.frequencies == nullptr) {
    to[unit] = from_float<To>(to_float(from[unit]));
    return;
  }
  const int a = unit * turn.step;
  const int b = a + turn.partner;
  const float x = to_float(from[a]);
  const float y = to_float(from[b]);
  to[a] = from_float<To>(x * angle.x - y * angle.y);
  to[b] = from_float<To>(y * angle.x + x * angle.y);
}

/// The block's sum, in every thread.
__device__ double block_sum(double value) {
  __shared__ double parts[kThreads / kWarp];
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(0xffffffffU, value, lanes);
  }
  __syncthreads();  // the parts of the block's row before this one have been read
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

template <class T>
__device__ void norm_row(const float* from, const Norm& norm, T* to) {
  double squares = 0;
  for (int64_t c = threadIdx.x; c < norm.width; c += kThreads) {
    squares += static_cast<double>(from[c]) * from[c];
  }
  const double mean = block_sum(squares) / static_cast<double>(norm.width);
  const auto scale = static_cast<float>(1 / sqrt(mean + norm.eps));
  for (int64_t c = threadIdx.x; c < norm.width; c += kThreads) {
    to[c] = from_float<T>(from[c] * scale * norm.weights[c]);
  }
}

// One block a token.
template <class T>
__global__ void norm_rows_kernel(const float* latents, int64_t num_tokens, Norm norm, void* to) {
  for (int64_t t = blockIdx.x; t < num_tokens; t += gridDim.x) {
    norm_row(latents + t * norm.width, norm, static_cast<T*>(to) + t * norm.width);
  }
}

// One block a token. Warps without a unit to turn are at the norm meanwhile.
template <class T>
__global__ void store_latents_kernel(const float* latents, const int32_t* positions,
                                     int64_t num_tokens, Norm norm, Turn turn, LatentRows to) {
  const int64_t width = norm.width + turn.width;
  for (int64_t t = blockIdx.x; t < num_tokens; t += gridDim.x) {
    const int64_t row = to.slots == nullptr ? t : to.slots[t];
    if (row < 0 || row >= to.num_rows) continue;  // the whole block
    const float* from = latents + t * width;
    T* target = static_cast<T*>(to.data) + row * width;
    for (int unit = threadIdx.x; unit < turn.num_units; unit += kThreads) {
      turn_unit(turn, from + norm.width, target + norm.width, unit,
                angle_of(turn, positions[t], unit));
    }
    norm_row(from, norm, target);
  }
}

/// Heads whose queries are turned, [T, num_heads, width] each.
struct QueryHeads {
  const void* from;
  int64_t token_stride, head_stride;
  void* to;
  int64_t num_tokens;
  int32_t num_heads, heads_per_block;
};

// A block turns heads_per_block heads (blockIdx.y) of a token, whose angles it forms once.
template <class T>
__global__ void turn_queries_kernel(QueryHeads heads, const int32_t* positions, Turn turn) {
  extern __shared__ float2 angles[];  // [num_units], not used where nothing turns
  const int32_t head_begin = static_cast<int32_t>(blockIdx.y) * heads.heads_per_block;
  const int32_t num_heads = min(heads.heads_per_block, heads.num_heads - head_begin);
  const bool turns = turn.frequencies != nullptr;
  for (int64_t t = blockIdx.x; t < heads.num_tokens; t += gridDim.x) {
    for (int unit = threadIdx.x; turns && unit < turn.num_units; unit += kThreads) {
      angles[unit] = angle_of(turn, positions[t], unit);
    }
    __syncthreads();
    for (int item = threadIdx.x; item < num_heads * turn.num_units; item += kThreads) {
      const int64_t head = head_begin + item / turn.num_units;
      const int unit = item % turn.num_units;
      turn_unit(
          turn,
          static_cast<const T*>(heads.from) + t * heads.token_stride + head * heads.head_stride,
          static_cast<T*>(heads.to) + (t * heads.num_heads + head) * turn.width, unit,
          turns ? angles[unit] : float2{1, 0});
    }
    __syncthreads();  // the next token writes the angles
  }
}

/// The instance of a kernel for a dtype.
template <class Kernel>
Kernel* instance(DType dtype, Kernel* fp32, Kernel* bf16, Kernel* fp16) {
  if (dtype == DType::kBFloat16) return bf16;
  return dtype == DType::kFloat16 ? fp16 : fp32;
}
auto norm_rows_of(DType dtype) {
  return instance(dtype, &norm_rows_kernel<float>, &norm_rows_kernel<__nv_bfloat16>,
                  &norm_rows_kernel<__half>);
}
auto store_latents_of(DType dtype) {
  return instance(dtype, &store_latents_kernel<float>, &store_latents_kernel<__nv_bfloat16>,
                  &store_latents_kernel<__half>);
}
auto turn_queries_of(DType dtype) {
  return instance(dtype, &turn_queries_kernel<float>, &turn_queries_kernel<__nv_bfloat16>,
                  &turn_queries_kernel<__half>);
}

unsigned blocks_for(int64_t num_tokens) {
  return static_cast<unsigned>(std::clamp<int64_t>(num_tokens, 1, kMaxBlocks));
}

class CudaOperations final : public Operations {
 public:
  explicit CudaOperations(Device device) : device_(device), cublas_(device) { load_kernels(); }

  size_t bytes() const override { return cublas_.bytes(); }

  void gemm(const ConstTensor<3>& x, const ConstTensor<3>& w, const Tensor<3>& y,
            Stream stream) override {
    cublas_.gemm(x, w, y, stream);
  }

  void norm_rows(const ConstTensor<2>& latents, const Norm& norm, const Tensor<2>& to,
                 Stream stream) override {
    const int64_t tokens = latents.shape[0];
    const DeviceGuard guard(device_.index);
    launch_kernel("norm_rows_kernel", norm_rows_of(to.dtype),
                  {.count = blocks_for(tokens), .threads = kThreads}, stream,
                  static_cast<const float*>(latents.data), tokens, norm, to.data);
  }

  void turn_queries(const ConstTensor<3>& q, const int32_t* positions, const Rope& rope,
                    const Tensor<3>& to, Stream stream) override {
    if (q.empty()) return;
    const Turn turn(rope);
    QueryHeads heads{.from = q.data,
                     .token_stride = q.stride[0],
                     .head_stride = q.stride[1],
                     .to = to.data,
                     .num_tokens = q.shape[0],
                     .num_heads = static_cast<int32_t>(q.shape[1])};
    heads.heads_per_block = static_cast<int32_t>(
        std::clamp<int64_t>(kUnitsPerBlock / turn.num_units, 1, heads.num_heads));
    const dim3 grid(blocks_for(heads.num_tokens),
                    (heads.num_heads + heads.heads_per_block - 1) / heads.heads_per_block);
    const size_t smem = static_cast<size_t>(rope.num_pairs()) * sizeof(float2);  // 32 KiB at most
    const DeviceGuard guard(device_.index);
    launch_kernel("turn_queries_kernel", turn_queries_of(q.dtype),
                  {.count = grid, .threads = kThreads, .dynamic_bytes = smem}, stream, heads,
                  positions, turn);
  }

  void store_latents(const ConstTensor<2>& latents, const int32_t* positions, const Norm& norm,
                     const Rope& rope, const LatentRows& to, Stream stream) override {
    const int64_t tokens = latents.shape[0];
    const DeviceGuard guard(device_.index);
    launch_kernel("store_latents_kernel", store_latents_of(to.dtype),
                  {.count = blocks_for(tokens), .threads = kThreads}, stream,
                  static_cast<const float*>(latents.data), positions, tokens, norm, Turn(rope), to);
  }

 private:
  // The driver would load each kernel at its first launch.
  void load_kernels() const {
    const DeviceGuard guard(device_.index);
    const auto load = [](auto* kernel) {
      cudaFuncAttributes attributes{};
      check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
            "cudaFuncGetAttributes", "load_kernels");
    };
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      load(norm_rows_of(dtype));
      load(store_latents_of(dtype));
      load(turn_queries_of(dtype));
    }
  }

  Device device_;
  Cublas cublas_;
};

}  // namespace

void check_available(Device device) {
  const DeviceMemory exists(device, 0);  // refuses one that is not there
  check_cublas();
}

std::unique_ptr<Operations> make_operations(Device device) {
  return std::make_unique<CudaOperations>(device);
}

}  // namespace mla::layer::cuda
