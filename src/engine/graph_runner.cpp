#include "mla/graph_runner.hpp"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "device/owned_event.hpp"
#include "device/runtime.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

constexpr int32_t kMaxSlots = 64;

[[noreturn]] void refuse(std::string what, const char* where, std::string expected,
                         std::string got) {
  throw_invalid({std::move(what), where, std::move(expected), std::move(got)});
}

std::string to_string(const GraphBucket& bucket) {
  return bucket.walk + " of " + std::to_string(bucket.shape.num_rows) + " rows, " +
         std::to_string(bucket.shape.num_tokens) + " tokens";
}

std::string to_string(const SlotLease& lease) {
  const std::string slot = "slot " + std::to_string(lease.slot);
  return lease.bucket ? slot + " of " + to_string(*lease.bucket) : slot + " without a bucket";
}

auto size_of(const GraphBucket& bucket) {
  return std::tuple(bucket.shape.num_tokens, bucket.shape.num_rows);
}

void check_options(const GraphOptions& options) {
  constexpr const char* kWhere = "GraphRunner";
  if (options.num_slots < 1 || options.num_slots > kMaxSlots) {
    refuse("num_slots", kWhere, "1 to " + std::to_string(kMaxSlots),
           std::to_string(options.num_slots));
  }
  if (!options.buckets.empty() && device::runtime_of(options.device).is_immediate()) {
    refuse("device", kWhere, "a device with graphs, since there are buckets",
           to_string(options.device));
  }
  for (size_t i = 0; i < options.buckets.size(); ++i) {
    const GraphBucket& bucket = options.buckets[i];
    const std::string name = "buckets[" + std::to_string(i) + "]";
    if (bucket.shape.num_rows < 1 || bucket.shape.num_tokens < 1) {
      refuse(name, kWhere, "at least 1 row and 1 token", to_string(bucket));
    }
    if (std::count(options.buckets.begin(), options.buckets.end(), bucket) > 1) {
      refuse(name, kWhere, "no bucket twice", to_string(bucket));
    }
  }
}

std::vector<GraphShape> shapes_of(const GraphOptions& options) {
  std::vector<GraphShape> shapes;
  shapes.reserve(options.buckets.size());
  for (const GraphBucket& bucket : options.buckets) {
    shapes.push_back({.num_rows = bucket.shape.num_rows,
                      .num_tokens = bucket.shape.num_tokens,
                      .num_listed_pages = options.max_listed_pages});
  }
  return shapes;
}

struct CapturedGraph {
  GraphBucket bucket;
  int32_t slot = 0;
  std::string piece;
  device::Graph graph{};
};

}  // namespace

struct GraphRunner::Impl {
  StepRunner& steps;
  GraphOptions options;
  device::Runtime& runtime;
  std::vector<CapturedGraph> graphs;
  std::vector<device::OwnedEvent> slot_done;  // behind the slot's last replay
  std::vector<Stream> streams;                // that replayed something
  int32_t next_slot = 0;

  Impl(StepRunner& step_runner, const GraphOptions& wanted)
      : steps(step_runner), options(wanted), runtime(device::runtime_of(wanted.device)) {
    std::sort(options.buckets.begin(), options.buckets.end(),
              [](const auto& a, const auto& b) { return size_of(a) < size_of(b); });
    for (int32_t slot = 0; slot < options.num_slots; ++slot) {
      slot_done.emplace_back(runtime);
    }
  }
  ~Impl() {
    for (const Stream stream : streams) device::quietly([&] { runtime.synchronize(stream); });
    forget_graphs();
  }

  const CapturedGraph* find(const SlotLease& lease, std::string_view piece) const {
    for (const CapturedGraph& captured : graphs) {
      if (captured.bucket == lease.bucket && captured.slot == lease.slot &&
          captured.piece == piece) {
        return &captured;
      }
    }
    return nullptr;
  }

  void check(const SlotLease& lease) const {
    constexpr const char* kWhere = "GraphRunner::run";
    if (lease.slot < 0 || lease.slot >= options.num_slots) {
      refuse("lease.slot", kWhere, "0 to " + std::to_string(options.num_slots - 1),
             std::to_string(lease.slot));
    }
    if (lease.bucket &&
        std::count(options.buckets.begin(), options.buckets.end(), *lease.bucket) == 0) {
      refuse("lease.bucket", kWhere, "one of this runner's buckets", to_string(*lease.bucket));
    }
    const SlotLease* planned = steps.planned_lease();
    if (planned == nullptr) throw_state({"step", kWhere, "a planned one", "none"});
    // A graph reads the plan of its own slot and bucket: another step's, if this one has not that.
    if (lease != *planned) {
      refuse("lease", kWhere, "the planned step's, " + to_string(*planned), to_string(lease));
    }
  }

  const CapturedGraph& capture(const GraphBucket& bucket, int32_t slot, Stream stream,
                               void (*body)(const void*, Stream), const void* context,
                               std::string_view piece) {
    // Nothing may fail between the end of the capture and the graph's place in the list.
    CapturedGraph captured{.bucket = bucket, .slot = slot, .piece = std::string(piece)};
    graphs.reserve(graphs.size() + 1);
    runtime.begin_capture(stream);
    try {
      body(context, stream);
    } catch (...) {
      // The body's error is told, also where it has broken the capture.
      device::quietly([&] { runtime.destroy_graph(runtime.end_capture(stream)); });
      throw;
    }
    captured.graph = runtime.end_capture(stream);
    return graphs.emplace_back(std::move(captured));
  }

  // What replays them is done.
  void forget_graphs() noexcept {
    for (const CapturedGraph& captured : graphs) runtime.destroy_graph(captured.graph);
    graphs.clear();
    streams.clear();
  }
};

GraphRunner::GraphRunner(StepRunner& steps, const GraphOptions& options) {
  check_options(options);
  impl_ = std::make_unique<Impl>(steps, options);
  if (!options.buckets.empty()) steps.size_graph_buffers(shapes_of(options));
}
GraphRunner::~GraphRunner() = default;

SlotLease GraphRunner::lease(std::string_view walk, int64_t num_rows, int64_t num_tokens) {
  Impl& impl = *impl_;
  SlotLease lease{.slot = impl.next_slot};
  impl.next_slot = (impl.next_slot + 1) % impl.options.num_slots;
  for (const GraphBucket& bucket : impl.options.buckets) {
    if (bucket.walk == walk && bucket.shape.num_rows >= num_rows &&
        bucket.shape.num_tokens >= num_tokens) {
      lease.bucket = bucket;
      break;
    }
  }
  if (impl.steps.force_double_buffer()) {
    impl.runtime.wait_on_host(impl.slot_done[static_cast<size_t>(lease.slot)].get());
  }
  return lease;
}

void GraphRunner::run_erased(const SlotLease& lease, Stream stream,
                             void (*body)(const void*, Stream), const void* context,
                             std::string_view piece) {
  Impl& impl = *impl_;
  impl.check(lease);
  if (!lease.bucket) {
    body(context, stream);
  } else {
    const CapturedGraph* captured = impl.find(lease, piece);
    if (captured == nullptr)
      captured = &impl.capture(*lease.bucket, lease.slot, stream, body, context, piece);
    impl.steps.order_replay(stream);
    impl.runtime.replay(captured->graph, stream);
  }
  if (std::find(impl.streams.begin(), impl.streams.end(), stream) == impl.streams.end()) {
    impl.streams.push_back(stream);
  }
  if (impl.steps.force_double_buffer()) {
    impl.runtime.record(impl.slot_done[static_cast<size_t>(lease.slot)].get(), stream);
  }
}

bool GraphRunner::is_captured(const SlotLease& lease, std::string_view piece) const {
  return impl_->find(lease, piece) != nullptr;
}

void GraphRunner::clear() {
  for (const Stream stream : impl_->streams) impl_->runtime.synchronize(stream);
  impl_->forget_graphs();
}

}  // namespace mla
