#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>

#include "device/test_device.hpp"

namespace mla::cuda {

using test::kCuda;

/// Tests of the GPU, skipped with the reason where there is none. None may leave an error behind.
class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = test::missing(kCuda);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  void TearDown() override {
    if (IsSkipped()) return;
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  /// Whether so much memory is free.
  static bool has_room(size_t bytes) {
    size_t free_bytes = 0, all = 0;
    return cudaMemGetInfo(&free_bytes, &all) == cudaSuccess && free_bytes >= bytes;
  }
};

/// Holds a stream up: what is queued behind close() waits until open(), or for two seconds, so that
/// a host that waits, as it must not, finds it open. Take all memory before: CUDA may wait for the
/// whole device to give or take some.
class Gate {
 public:
  ~Gate() {
    open();
    cudaDeviceSynchronize();  // nobody looks at it any more
  }

  void close(Stream stream) {
    const auto wait = [](void* data) {
      auto* gate = static_cast<Gate*>(data);
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(2);
      while (!gate->is_open_ && std::chrono::steady_clock::now() < limit) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      gate->open();
    };
    ASSERT_EQ(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream.handle), wait, this),
              cudaSuccess);
  }
  void open() { is_open_ = true; }
  bool is_open() const { return is_open_; }
  /// A thread that opens it after a while.
  std::jthread open_after(std::chrono::milliseconds delay) {
    return std::jthread([this, delay] {
      std::this_thread::sleep_for(delay);
      open();
    });
  }

 private:
  std::atomic<bool> is_open_ = false;
};

}  // namespace mla::cuda
