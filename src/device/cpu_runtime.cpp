#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <new>

#include "cpu/operations.hpp"
#include "device/runtimes.hpp"
#include "mla/error.hpp"

namespace mla::device {
namespace {

constexpr std::align_val_t kAlignment{64};

// Scratch is sized for the worst plan within the limits, which few plans come near: from this size
// on it is mapped, so that what no plan touches takes no memory.
constexpr size_t kMappedFrom = size_t{64} << 20;
// Before the memory: how much is mapped, 0 where it is from the heap. Keeps the alignment.
constexpr size_t kHeader = 64;

void* map(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

[[noreturn]] void refuse_capture() {
  throw_invalid({.what = "stream",
                 .where = "begin_capture",
                 .expected = "a device with graphs",
                 .got = "cpu"});
}

class CpuRuntime final : public Runtime {
 public:
  bool is_immediate() const override { return true; }
  void* allocate(size_t bytes) override {
    auto* base = static_cast<std::byte*>(
        bytes < kMappedFrom ? ::operator new(bytes + kHeader, kAlignment) : map(bytes + kHeader));
    const size_t mapped = bytes < kMappedFrom ? 0 : bytes + kHeader;
    std::memcpy(base, &mapped, sizeof(mapped));
    return base + kHeader;
  }
  void release(void* memory) noexcept override {
    if (memory == nullptr) return;
    std::byte* base = static_cast<std::byte*>(memory) - kHeader;
    size_t mapped = 0;
    std::memcpy(&mapped, base, sizeof(mapped));
    if (mapped == 0) {
      ::operator delete(base, kAlignment);
    } else {
      munmap(base, mapped);
    }
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

  // Everything is done when it is asked for, so events are always reached.
  Event create_event() override { return {}; }
  void destroy_event(Event) noexcept override {}
  void record(Event, Stream) override {}
  bool is_reached(Event) override { return true; }
  void wait_on_host(Event) override {}
  void wait_on_stream(Stream, Event) override {}
  void synchronize(Stream) override {}

  bool is_capturing(Stream) override { return false; }
  void begin_capture(Stream) override { refuse_capture(); }
  Graph end_capture(Stream) override { refuse_capture(); }
  void replay(Graph, Stream) override { refuse_capture(); }
  void destroy_graph(Graph) noexcept override {}

  void submit(Stream, const char*, std::function<void()> work) override { work(); }
  Operations& operations() override { return operations_; }

 private:
  cpu::HostOperations operations_{*this};
};

}  // namespace

Runtime& cpu_runtime() {
  static CpuRuntime runtime;
  return runtime;
}

}  // namespace mla::device
