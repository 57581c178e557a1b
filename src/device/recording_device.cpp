#include "mla/recording_device.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <span>
#include <utility>

#include "cpu/operations.hpp"
#include "device/runtimes.hpp"
#include "mla/error.hpp"

namespace mla {
namespace device {
namespace {

constexpr std::align_val_t kAlignment{64};

struct Point;

/// One queued call. It may be done once `after` is reached.
struct Call {
  std::string name;
  std::function<void()> work;
  Point* after = nullptr;
};

struct QueuedStream {
  std::deque<Call> queue;
  bool capturing = false;
  std::vector<Call> captured;
};

/// Every record of an event is a point of its own: a wait means the last one before it, whatever is
/// recorded later.
struct Point {
  QueuedStream* stream = nullptr;
  bool reached = false;
};
struct EventState {
  std::vector<std::unique_ptr<Point>> points;
};

struct RecordedGraph {
  std::vector<Call> calls;
  std::map<void*, size_t> memory;  // alive when it was captured
};

class RecordingRuntime final : public Runtime {
 public:
  RecordingRuntime() { streams_[nullptr]; }

  bool is_immediate() const override { return false; }

  void* allocate(size_t bytes) override {
    note("allocate " + std::to_string(bytes) + " B");
    ++num_allocations;
    if (any_capturing()) violations.push_back("memory was allocated inside a capture");
    void* memory = ::operator new(std::max<size_t>(bytes, 1), kAlignment);
    memory_[memory] = bytes;
    return memory;
  }
  void release(void* memory) noexcept override {
    if (memory == nullptr) return;
    drain_all(0);
    if (any_capturing()) violations.push_back("memory was released inside a capture");
    for (const auto& graph : graphs_) {
      if (graph->memory.count(memory) != 0) {
        violations.push_back("memory was released that a live graph may use");
        break;
      }
    }
    memory_.erase(memory);
    ::operator delete(memory, kAlignment);
  }
  void* allocate_staging(size_t bytes) override { return allocate(bytes); }
  void release_staging(void* memory) noexcept override { release(memory); }

  void copy_to_device(void* to, const void* from, size_t bytes, Stream stream) override {
    // What the source holds now is what must arrive.
    std::vector<std::byte> expected(bytes);
    std::memcpy(expected.data(), from, bytes);
    enqueue(stream,
            {.name = "copy " + std::to_string(bytes) + " B",
             .work = [this, to, from, bytes, expected = std::move(expected)] {
               if (std::memcmp(from, expected.data(), bytes) != 0) {
                 violations.push_back("a staging buffer was written before its copy was done");
               }
               std::memcpy(to, from, bytes);
             }});
  }

  void copy_to_host(void* to, const void* from, size_t bytes, Stream stream) override {
    enqueue(stream, {.name = "copy " + std::to_string(bytes) + " B to the host",
                     .work = [to, from, bytes] { std::memcpy(to, from, bytes); }});
  }
  void fill(void* memory, int value, size_t bytes, Stream stream) override {
    enqueue(stream, {.name = "fill " + std::to_string(bytes) + " B",
                     .work = [memory, value, bytes] { std::memset(memory, value, bytes); }});
  }

  Stream create_stream() override {
    streams_[reinterpret_cast<void*>(++last_stream_)];  // NOLINT(performance-no-int-to-ptr): a name
    return {reinterpret_cast<void*>(last_stream_)};     // NOLINT(performance-no-int-to-ptr): a name
  }
  void destroy_stream(Stream stream) noexcept override { finish(stream); }

  Event create_event() override {
    events_[++last_event_];
    return {reinterpret_cast<void*>(last_event_)};  // NOLINT(performance-no-int-to-ptr): a name
  }
  void destroy_event(Event) noexcept override {}  // queued markers may still name it
  void record(Event event, Stream stream) override {
    auto& points = events_[id_of(event)].points;
    points.push_back(std::make_unique<Point>(Point{.stream = &streams_[stream.handle]}));
    enqueue(stream,
            {.name = "event", .work = [point = points.back().get()] { point->reached = true; }});
  }
  bool is_reached(Event event) override {
    const Point* point = last_point(event);
    return point == nullptr || point->reached;
  }
  void wait_on_host(Event event) override {
    note("host wait");
    ++num_host_waits;
    if (any_capturing()) violations.push_back("the host waited inside a capture");
    reach(last_point(event));
  }
  void wait_on_stream(Stream stream, Event event) override {
    enqueue(stream, {.name = "wait", .work = [] {}, .after = last_point(event)});
  }
  void synchronize(Stream stream) override {
    note("host wait");
    ++num_host_waits;
    if (any_capturing()) violations.push_back("the host waited inside a capture");
    finish(stream);
  }

  bool is_capturing(Stream stream) override { return streams_[stream.handle].capturing; }
  void begin_capture(Stream stream) override {
    note("begin capture");
    QueuedStream& queued = streams_[stream.handle];
    queued.capturing = true;
    queued.captured.clear();
  }
  Graph end_capture(Stream stream) override {
    note("end capture");
    QueuedStream& queued = streams_[stream.handle];
    if (!queued.capturing) {
      throw_state({.what = "stream",
                   .where = "end_capture",
                   .expected = "one in a capture",
                   .got = "one that is in none"});
    }
    queued.capturing = false;
    graphs_.push_back(std::make_unique<RecordedGraph>(
        RecordedGraph{std::exchange(queued.captured, {}), memory_}));
    return {graphs_.back().get()};
  }
  void replay(Graph graph, Stream stream) override {
    note("replay");
    for (const Call& call : static_cast<RecordedGraph*>(graph.handle)->calls) {
      enqueue(stream, call);
    }
  }
  void destroy_graph(Graph graph) noexcept override {
    std::erase_if(graphs_, [&](const auto& kept) { return kept.get() == graph.handle; });
  }

  void submit(Stream stream, const char* name, std::function<void()> work) override {
    enqueue(stream, {.name = name, .work = std::move(work)});
  }
  Operations& operations() override { return operations_; }

  void finish(Stream stream) {
    QueuedStream& queued = streams_[stream.handle];
    while (!queued.queue.empty()) do_next(queued);
  }
  void drain_all(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::vector<QueuedStream*> busy;; busy.clear()) {
      for (auto& [handle, stream] : streams_) {
        if (!stream.queue.empty()) busy.push_back(&stream);
      }
      if (busy.empty()) return;
      do_next(*busy[random() % busy.size()]);
    }
  }

  std::vector<std::string> calls;
  std::vector<std::string> violations;
  int64_t num_allocations = 0;
  int64_t num_host_waits = 0;

 private:
  cpu::HostOperations operations_{*this};

  static uint64_t id_of(Event event) { return reinterpret_cast<uint64_t>(event.handle); }

  void note(std::string name) { calls.push_back(std::move(name)); }
  bool any_capturing() const {
    return std::any_of(streams_.begin(), streams_.end(),
                       [](const auto& entry) { return entry.second.capturing; });
  }
  void enqueue(Stream stream, Call call) {
    QueuedStream& queued = streams_[stream.handle];
    note((queued.capturing ? "captured " : "") + call.name);
    if (queued.capturing) {
      queued.captured.push_back(std::move(call));
    } else {
      queued.queue.push_back(std::move(call));
    }
  }
  void do_next(QueuedStream& stream) {
    const Call call = std::move(stream.queue.front());
    stream.queue.pop_front();
    reach(call.after);
    call.work();
  }
  Point* last_point(Event event) {
    const auto& points = events_[id_of(event)].points;
    return points.empty() ? nullptr : points.back().get();
  }
  // A point whose stream has nothing queued any more was captured and never replayed.
  void reach(const Point* point) {
    while (point != nullptr && !point->reached && !point->stream->queue.empty()) {
      do_next(*point->stream);
    }
  }

  std::map<void*, QueuedStream> streams_;
  std::map<uint64_t, EventState> events_;
  std::vector<std::unique_ptr<RecordedGraph>> graphs_;
  std::map<void*, size_t> memory_;
  uint64_t last_event_ = 0;
  uintptr_t last_stream_ = 0;
};

struct Registry {
  std::mutex mutex;
  std::map<int32_t, RecordingRuntime*> runtimes;
  int32_t next = 0;
};

Registry& registry() {
  static Registry devices;
  return devices;
}

}  // namespace

Runtime* find_recording_runtime(int32_t index) {
  Registry& devices = registry();
  const std::lock_guard lock(devices.mutex);
  const auto found = devices.runtimes.find(index);
  return found == devices.runtimes.end() ? nullptr : found->second;
}

}  // namespace device

struct RecordingDevice::Impl {
  device::RecordingRuntime runtime;
  int32_t index = 0;
};

RecordingDevice::RecordingDevice() : impl_(std::make_unique<Impl>()) {
  auto& devices = device::registry();
  const std::lock_guard lock(devices.mutex);
  impl_->index = devices.next++;
  devices.runtimes[impl_->index] = &impl_->runtime;
}

RecordingDevice::~RecordingDevice() {
  auto& devices = device::registry();
  const std::lock_guard lock(devices.mutex);
  devices.runtimes.erase(impl_->index);
}

Device RecordingDevice::device() const noexcept { return {DeviceKind::kRecording, impl_->index}; }
Stream RecordingDevice::create_stream() { return impl_->runtime.create_stream(); }
void RecordingDevice::finish(Stream stream) { impl_->runtime.finish(stream); }
void RecordingDevice::finish_all(uint64_t seed) { impl_->runtime.drain_all(seed); }
const std::vector<std::string>& RecordingDevice::calls() const noexcept {
  return impl_->runtime.calls;
}
const std::vector<std::string>& RecordingDevice::violations() const noexcept {
  return impl_->runtime.violations;
}
int64_t RecordingDevice::num_allocations() const noexcept { return impl_->runtime.num_allocations; }
int64_t RecordingDevice::num_host_waits() const noexcept { return impl_->runtime.num_host_waits; }

}  // namespace mla
