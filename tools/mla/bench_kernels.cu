#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/device_guard.hpp"
#include "cuda/error.hpp"
#include "cuda/launch.hpp"
#include "cuda/sm90/ptx.cuh"
#include "mla/bench_kernels.hpp"

namespace mla::cli {
namespace {

constexpr int kLanes = 32;
constexpr int kMostStages = 16;
constexpr int kRingBytes = 200 * 1024;
constexpr int kUnitBytes = 16;

/// Bytes to shared memory; they count towards the phase of `barrier`. All are multiples of 16.
[[maybe_unused]] __device__ inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes,
                                                  uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// One warp a block. Each lane copies one run of a part; a stage of the ring holds a part. Runs are
// looked up four parts ahead.
__global__ void __launch_bounds__(kLanes)
    copy_parts([[maybe_unused]] const ReadParts parts, [[maybe_unused]] const std::byte* base,
               [[maybe_unused]] const int num_stages) {
#if __CUDA_ARCH__ >= 900
  using namespace cuda::sm90;
  using cuda::shared_address;
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ uint64_t barriers[kMostStages];
  constexpr int kAhead = 4;
  const int lane = static_cast<int>(threadIdx.x);
  const int stride = static_cast<int>(gridDim.x);
  const uint32_t first_barrier = shared_address(barriers);
  const uint32_t run_bytes = static_cast<uint32_t>(parts.most_units) * kUnitBytes;
  const uint32_t stage_bytes = static_cast<uint32_t>(parts.runs_of_a_part) * run_bytes;
  if (lane < num_stages) barrier_init(first_barrier + lane * sizeof(uint64_t), 1);
  fence_barrier_init();
  __syncwarp();

  const auto run_of = [&](int part) {
    return part < parts.num_parts && lane < parts.runs_of_a_part
               ? parts.runs[static_cast<int64_t>(part) * parts.runs_of_a_part + lane]
               : ReadRun{};
  };
  ReadRun ahead[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) ahead[k] = run_of(static_cast<int>(blockIdx.x) + k * stride);
  int stage = 0;
  int uses = 0;  // of each stage before this one, all of them full
  for (int part = static_cast<int>(blockIdx.x); part < parts.num_parts; part += kAhead * stride) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (part + k * stride >= parts.num_parts) break;
      const ReadRun run = ahead[k];
      ahead[k] = run_of(part + (k + kAhead) * stride);
      const uint32_t barrier = first_barrier + stage * sizeof(uint64_t);
      if (uses > 0) barrier_wait(barrier, (uses - 1) & 1);
      const uint32_t bytes = run.count * kUnitBytes;
      const uint32_t all_bytes = __reduce_add_sync(0xffffffff, bytes);
      if (lane == 0) barrier_arrive_expecting(barrier, all_bytes);
      __syncwarp();
      if (bytes > 0) {
        copy_bulk(shared_address(ring) + stage * stage_bytes + lane * run_bytes,
                  base + static_cast<int64_t>(run.begin) * kUnitBytes, bytes, barrier);
      }
      if (++stage == num_stages) {
        stage = 0;
        ++uses;
      }
    }
  }
  for (int s = 0; s < num_stages; ++s) {  // nothing may arrive after the block is gone
    const int filled = s < stage ? uses + 1 : uses;
    if (filled > 0) barrier_wait(first_barrier + s * sizeof(uint64_t), (filled - 1) & 1);
  }
#endif
}

__device__ inline uint32_t fold(uint4 value) { return value.x ^ value.y ^ value.z ^ value.w; }

// A warp a run. `never` is null; what is read must reach something.
__global__ void load_parts(const ReadParts parts, const uint4* base, uint32_t* never) {
  const int64_t num_runs = static_cast<int64_t>(parts.num_parts) * parts.runs_of_a_part;
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kLanes;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  uint32_t sum = 0;
  for (int64_t at = first; at < num_runs; at += num_warps) {
    const ReadRun run = parts.runs[at];
#pragma unroll 8
    for (uint32_t unit = threadIdx.x % kLanes; unit < run.count; unit += kLanes) {
      sum ^= fold(base[static_cast<int64_t>(run.begin) + unit]);
    }
  }
  if (never != nullptr) *never = sum;
}

__global__ void load_all(const uint4* data, int64_t num_units, uint32_t* never) {
  constexpr int kUnroll = 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  uint32_t sum = 0;
  for (; at + (kUnroll - 1) * step < num_units; at += kUnroll * step) {
    uint4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) values[i] = data[at + i * step];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) sum ^= fold(values[i]);
  }
  for (; at < num_units; at += step) sum ^= fold(data[at]);
  if (never != nullptr) *never = sum;
}

__global__ void do_nothing() {}

int ask(cudaDeviceAttr attribute, Device device) {
  int value = 0;
  MLA_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device.index));
  return value;
}

}  // namespace

void queue_page_reads(const ReadParts& parts, const void* base, Device device, Stream stream) {
  const cuda::DeviceGuard guard(device.index);
  const int num_sms = ask(cudaDevAttrMultiProcessorCount, device);
  if (ask(cudaDevAttrComputeCapabilityMajor, device) < 9) {
    constexpr int kThreads = 512;
    cuda::launch_kernel("load_parts", load_parts,
                        {.count = static_cast<unsigned>(num_sms * 4), .threads = kThreads}, stream,
                        parts, static_cast<const uint4*>(base), nullptr);
  } else {
    const int stage_bytes = parts.runs_of_a_part * parts.most_units * kUnitBytes;
    const int num_stages = std::clamp(kRingBytes / stage_bytes, 1, kMostStages);
    MLA_CUDA_CHECK(cudaFuncSetAttribute(copy_parts, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        num_stages * stage_bytes));
    cuda::launch_kernel("copy_parts", copy_parts,
                        {.count = static_cast<unsigned>(std::min(parts.num_parts, num_sms)),
                         .threads = kLanes,
                         .dynamic_bytes = static_cast<size_t>(num_stages * stage_bytes)},
                        stream, parts, static_cast<const std::byte*>(base), num_stages);
  }
}

void queue_read(const void* data, size_t bytes, Device device, Stream stream) {
  const cuda::DeviceGuard guard(device.index);
  const int num_sms = ask(cudaDevAttrMultiProcessorCount, device);
  constexpr int kThreads = 512;
  cuda::launch_kernel(
      "load_all", load_all, {.count = static_cast<unsigned>(num_sms * 4), .threads = kThreads},
      stream, static_cast<const uint4*>(data), static_cast<int64_t>(bytes / kUnitBytes), nullptr);
}

void queue_nothing(Device device, Stream stream) {
  const cuda::DeviceGuard guard(device.index);
  cuda::launch_kernel("do_nothing", do_nothing, {.count = 1, .threads = kLanes}, stream);
}

}  // namespace mla::cli
