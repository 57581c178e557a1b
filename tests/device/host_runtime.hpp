#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "device/runtime.hpp"
#include "mla/error.hpp"

namespace mla::test {

/// A device with streams whose work is done at once, for what a RecordingDevice can not show: calls
/// of operator new (it makes none), memory and events that are not given back, a failure in the
/// middle. It has no graphs and no operations.
class HostRuntime final : public device::Runtime {
 public:
  int64_t num_held = 0;  ///< memory and events that are not given back
  /// Calls that take memory or an event and still succeed. Memory then throws std::bad_alloc, an
  /// event CudaError.
  int64_t num_left = std::numeric_limits<int64_t>::max();
  bool waits_fail = false;  ///< with CudaError

  bool is_immediate() const override { return false; }
  void* allocate(size_t bytes) override {
    if (num_left == 0) throw std::bad_alloc();
    take();
    return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  }
  void release(void* memory) noexcept override {
    if (memory != nullptr) --num_held;
    std::free(memory);
  }
  void* allocate_staging(size_t bytes) override { return allocate(bytes); }
  void release_staging(void* memory) noexcept override { release(memory); }

  void copy_to_device(void* to, const void* from, size_t bytes, Stream) override {
    std::memcpy(to, from, bytes);
  }
  void copy_to_host(void* to, const void* from, size_t bytes, Stream) override {
    std::memcpy(to, from, bytes);
  }
  void fill(void* memory, int value, size_t bytes, Stream) override {
    std::memset(memory, value, bytes);
  }

  Stream create_stream() override { return {}; }
  void destroy_stream(Stream) noexcept override {}

  device::Event create_event() override {
    if (num_left == 0) fail("create_event");
    take();
    return {this};
  }
  void destroy_event(device::Event) noexcept override { --num_held; }
  void record(device::Event, Stream) override {}
  bool is_reached(device::Event) override { return true; }
  void wait_on_host(device::Event) override {
    if (waits_fail) fail("wait_on_host");
  }
  void wait_on_stream(Stream, device::Event) override {}
  void synchronize(Stream) override {
    if (waits_fail) fail("synchronize");
  }

  bool is_capturing(Stream) override { return false; }
  void begin_capture(Stream) override { fail("begin_capture"); }
  device::Graph end_capture(Stream) override { fail("end_capture"); }
  void replay(device::Graph, Stream) override { fail("replay"); }
  void destroy_graph(device::Graph) noexcept override {}

  void submit(Stream, const char*, std::function<void()> work) override { work(); }
  device::Operations& operations() override { fail("operations"); }

 private:
  void take() {
    --num_left;
    ++num_held;
  }
  [[noreturn]] static void fail(const char* call) {
    throw CudaError({.what = call, .where = "HostRuntime", .expected = "success", .got = "failure"},
                    1);
  }
};

}  // namespace mla::test
