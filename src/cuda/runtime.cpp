#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "cuda/card.hpp"
#include "cuda/device_guard.hpp"
#include "cuda/device_limits.hpp"
#include "cuda/error.hpp"
#include "cuda/operations.hpp"
#include "device/runtimes.hpp"
#include "mla/error.hpp"

namespace mla::cuda {
namespace {

cudaStream_t handle(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t handle(device::Event event) { return static_cast<cudaEvent_t>(event.handle); }
cudaGraphExec_t handle(device::Graph graph) { return static_cast<cudaGraphExec_t>(graph.handle); }

class CudaRuntime final : public device::Runtime {
 public:
  explicit CudaRuntime(int32_t index) : index_(index), operations_(index) {}

  bool is_immediate() const override { return false; }

  void* allocate(size_t bytes) override {
    // Whatever will be captured or run behind blocked streams takes memory before.
    std::call_once(prepared_, [this] { operations_.prepare(); });
    const DeviceGuard guard(index_);
    void* memory = nullptr;
    check_memory(cudaMalloc(&memory, at_least_one(bytes)), "cudaMalloc");
    return memory;
  }
  void release(void* memory) noexcept override { cudaFree(memory); }
  void* allocate_staging(size_t bytes) override {
    const DeviceGuard guard(index_);
    void* memory = nullptr;
    check_memory(cudaHostAlloc(&memory, at_least_one(bytes), cudaHostAllocPortable),
                 "cudaHostAlloc");
    return memory;
  }
  void release_staging(void* memory) noexcept override { cudaFreeHost(memory); }

  void copy_to_device(void* to, const void* from, size_t bytes, Stream stream) override {
    const DeviceGuard guard(index_);
    MLA_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, handle(stream)));
  }
  void copy_to_host(void* to, const void* from, size_t bytes, Stream stream) override {
    const DeviceGuard guard(index_);
    MLA_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, handle(stream)));
  }
  void fill(void* memory, int value, size_t bytes, Stream stream) override {
    const DeviceGuard guard(index_);
    MLA_CUDA_CHECK(cudaMemsetAsync(memory, value, bytes, handle(stream)));
  }

  Stream create_stream() override {
    const DeviceGuard guard(index_);
    cudaStream_t stream = nullptr;
    MLA_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return {stream};
  }
  void destroy_stream(Stream stream) noexcept override {
    cudaStreamSynchronize(handle(stream));
    cudaStreamDestroy(handle(stream));
  }

  device::Event create_event() override {
    const DeviceGuard guard(index_);
    cudaEvent_t event = nullptr;
    MLA_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return {event};
  }
  void destroy_event(device::Event event) noexcept override { cudaEventDestroy(handle(event)); }
  void record(device::Event event, Stream stream) override {
    const DeviceGuard guard(index_);
    MLA_CUDA_CHECK(cudaEventRecord(handle(event), handle(stream)));
  }
  bool is_reached(device::Event event) override {
    const cudaError_t answer = cudaEventQuery(handle(event));
    if (answer == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check(answer, "cudaEventQuery", "is_reached");
    return true;
  }
  void wait_on_host(device::Event event) override {
    MLA_CUDA_CHECK(cudaEventSynchronize(handle(event)));
  }
  void wait_on_stream(Stream stream, device::Event event) override {
    const DeviceGuard guard(index_);
    MLA_CUDA_CHECK(cudaStreamWaitEvent(handle(stream), handle(event), 0));
  }
  void synchronize(Stream stream) override {
    const DeviceGuard guard(index_);
    MLA_CUDA_CHECK(cudaStreamSynchronize(handle(stream)));
  }

  bool is_capturing(Stream stream) override {
    const DeviceGuard guard(index_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t answer = cudaStreamIsCapturing(handle(stream), &status);
    // The default stream can not be captured; asked while another stream is, it says so.
    if (answer == cudaErrorStreamCaptureImplicit) {
      cudaGetLastError();
      return false;
    }
    check(answer, "cudaStreamIsCapturing", "is_capturing");
    return status != cudaStreamCaptureStatusNone;
  }
  void begin_capture(Stream stream) override {
    const DeviceGuard guard(index_);
    MLA_CUDA_CHECK(cudaStreamBeginCapture(handle(stream), cudaStreamCaptureModeThreadLocal));
  }
  device::Graph end_capture(Stream stream) override {
    const DeviceGuard guard(index_);
    cudaGraph_t graph = nullptr;
    MLA_CUDA_CHECK(cudaStreamEndCapture(handle(stream), &graph));
    cudaGraphExec_t exec = nullptr;
    const cudaError_t answer = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    check(answer, "cudaGraphInstantiate", "end_capture");
    return {exec};
  }
  void replay(device::Graph graph, Stream stream) override {
    const DeviceGuard guard(index_);
    MLA_CUDA_CHECK(cudaGraphLaunch(handle(graph), handle(stream)));
  }
  void destroy_graph(device::Graph graph) noexcept override {
    if (graph.handle != nullptr) cudaGraphExecDestroy(handle(graph));
  }

  void submit(Stream, const char*, std::function<void()>) override {
    throw_state({.what = "submit",
                 .where = "Runtime",
                 .expected = "a device whose memory the host reaches",
                 .got = "cuda:" + std::to_string(index_)});
  }

  device::Operations& operations() override { return operations_; }

 private:
  static size_t at_least_one(size_t bytes) { return bytes == 0 ? 1 : bytes; }
  static void check_memory(cudaError_t answer, const char* call) {
    if (answer == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw std::bad_alloc();
    }
    check(answer, call, "allocate");
  }

  int32_t index_;
  CudaOperations operations_;
  std::once_flag prepared_;
};

// Every device of the machine, found at the first question.
struct Devices {
  std::string missing;  // why there is none
  std::vector<std::unique_ptr<CudaRuntime>> runtimes;
  std::vector<DeviceLimits> limits;

  Devices() {
    const int32_t count = count_cards(missing);
    for (int32_t index = 0; index < count; ++index) {
      runtimes.push_back(std::make_unique<CudaRuntime>(index));
      limits.push_back(limits_of(index));
    }
  }

  static DeviceLimits limits_of(int32_t index) {
    const auto ask = [index](cudaDeviceAttr attribute) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, attribute, index), "cudaDeviceGetAttribute",
            "device_limits");
      return value;
    };
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties", "device_limits");
    return {.name = properties.name,
            .compute_capability = 10 * ask(cudaDevAttrComputeCapabilityMajor) +
                                  ask(cudaDevAttrComputeCapabilityMinor),
            .num_sms = ask(cudaDevAttrMultiProcessorCount),
            .smem_per_block = ask(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
  }
};

Devices& devices() {
  static Devices* const all = new Devices;  // outlives every static object that still uses it
  return *all;
}

}  // namespace

const DeviceLimits& device_limits(int32_t index) {
  return devices().limits.at(static_cast<size_t>(index));
}

}  // namespace mla::cuda

mla::device::Runtime* mla::device::find_cuda_runtime(int32_t index, std::string& reason) {
  auto& all = cuda::devices();
  const auto count = static_cast<int32_t>(all.runtimes.size());
  if (index >= 0 && index < count) return all.runtimes[static_cast<size_t>(index)].get();
  reason = count == 0 ? "cpu: there is no CUDA device (" + all.missing + ")"
                      : "cuda:0 to cuda:" + std::to_string(count - 1);
  return nullptr;
}
