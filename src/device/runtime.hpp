#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "mla/device.hpp"
#include "mla/export.hpp"

// The few things that the library asks of a device besides its kernels. What stands above (staging,
// graphs, resources) is written once against this and runs on each of them.
namespace mla::device {

class Operations;

/// A point in the work of a stream.
struct Event {
  void* handle = nullptr;
};

/// A captured piece of work.
struct Graph {
  void* handle = nullptr;
};

class Runtime {
 public:
  virtual ~Runtime() = default;

  /// True where work is done when the call that asks for it returns: there are no streams, and
  /// host memory is device memory.
  virtual bool is_immediate() const = 0;

  /// Memory of the device, 64-byte aligned. Throws std::bad_alloc.
  virtual void* allocate(size_t bytes) = 0;
  /// Work that is queued, on whatever stream, is done before the memory is gone.
  virtual void release(void* memory) noexcept = 0;
  /// Host memory that copies read while the host goes on (page-locked where that matters).
  virtual void* allocate_staging(size_t bytes) = 0;
  virtual void release_staging(void* memory) noexcept = 0;

  /// Queues a copy; `from` must keep its contents until the copy is done.
  virtual void copy_to_device(void* to, const void* from, size_t bytes, Stream stream) = 0;
  /// Queues a copy; `to` has its contents once the stream got there.
  virtual void copy_to_host(void* to, const void* from, size_t bytes, Stream stream) = 0;
  /// Queues setting every byte.
  virtual void fill(void* memory, int value, size_t bytes, Stream stream) = 0;

  /// A stream beside the default one. On the CPU there is but one.
  virtual Stream create_stream() = 0;
  virtual void destroy_stream(Stream stream) noexcept = 0;

  virtual Event create_event() = 0;
  virtual void destroy_event(Event event) noexcept = 0;
  /// The event is now behind everything queued on the stream so far.
  virtual void record(Event event, Stream stream) = 0;
  /// An event that was never recorded counts as reached.
  virtual bool is_reached(Event event) = 0;
  virtual void wait_on_host(Event event) = 0;
  /// What is queued on the stream from now on runs after the event.
  virtual void wait_on_stream(Stream stream, Event event) = 0;
  virtual void synchronize(Stream stream) = 0;

  virtual bool is_capturing(Stream stream) = 0;
  /// Work queued on the stream between the two calls is kept in the graph instead of being done.
  virtual void begin_capture(Stream stream) = 0;
  virtual Graph end_capture(Stream stream) = 0;
  virtual void replay(Graph graph, Stream stream) = 0;
  virtual void destroy_graph(Graph graph) noexcept = 0;

  /// Runs `work` in the stream's order on host-visible device memory: at once on the CPU, when its
  /// turn comes on the recording device. `name` is what a recording shows. CUDA has kernels instead
  /// and never gets here.
  virtual void submit(Stream stream, const char* name, std::function<void()> work) = 0;

  /// What the device does around attention.
  virtual Operations& operations() = 0;
};

/// Does what must not throw: cleaning up in a destructor, or while another error is under way. An
/// error of the device ends it and is not told; one that stays is thrown by the next call that may.
template <class Work>
void quietly(const Work& work) noexcept {
  try {
    work();
  } catch (...) {  // NOLINT(bugprone-empty-catch): see above
  }
}

/// Null, and what there is instead, where the build or the machine has no such device. Allocates
/// only then.
MLA_API Runtime* find_runtime(Device device, std::string& instead);

/// The runtime of a device. Throws InvalidArgument, in the name of `what` and `where`, where the
/// library has none.
MLA_API Runtime& runtime_of(Device device, const char* what = "device",
                            const char* where = "runtime_of");

/// Whether work of this device is done by the kernels of the CPU table.
inline bool runs_on_host(Device device) { return device.kind != DeviceKind::kCuda; }

}  // namespace mla::device
