#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "mla/device.hpp"
#include "mla/export.hpp"
#include "mla/step.hpp"
#include "mla/step_runner.hpp"

namespace mla {

struct GraphOptions {
  Device device{};
  std::vector<GraphBucket> buckets;  ///< every shape that may be captured
  int32_t num_slots = 2;             ///< copies of everything that a plan writes, 1 to 64
  /// Page ids that one label's plan under a bucket may list.
  int64_t max_listed_pages = 1 << 20;
};

/// Captures a step once for every bucket and slot, and replays it from then on.
///
///   const SlotLease lease = graphs.lease("decode", num_rows, num_tokens);
///   steps.plan(step, lease, stream);              // pads the batch up to the bucket
///   graphs.run(lease, stream, [&](Stream s) { model_forward(s); });
///
/// What the body queues must be the same calls on the same addresses every time: the second step of
/// a bucket and slot does not call it. A step that fits no bucket gets a lease without one, and its
/// body is called, eagerly. Calls on one object must not overlap.
class MLA_API GraphRunner {
 public:
  /// `steps` is lent and must outlive the runner; its graph buffers are sized here for all buckets.
  /// Throws InvalidArgument (buckets on a device without graphs, two equal buckets, an empty shape,
  /// fewer than one slot), CudaError, std::bad_alloc.
  GraphRunner(StepRunner& steps, const GraphOptions& options);
  /// Waits for the streams that replay. An error of the device ends the wait and is not told: one
  /// that stays is thrown by the next call that may throw.
  ~GraphRunner();
  GraphRunner(const GraphRunner&) = delete;
  GraphRunner& operator=(const GraphRunner&) = delete;

  /// The walk's smallest bucket (in tokens, then rows) that holds the batch, and the next slot in
  /// turn. Waits only where a resource needs it (Resource::force_double_buffer) and the slot's last
  /// replay is not done. Throws CudaError.
  SlotLease lease(std::string_view walk, int64_t num_rows, int64_t num_tokens);

  /// Runs a planned step, or one piece of it, on the stream: captures `body(stream)` if this
  /// bucket, slot and piece is new, then replays the graph behind the plan's copies. Several pieces
  /// may be run inside one step, with eager work between them. Where the body throws, nothing is
  /// kept and its error is passed on. Throws InvalidArgument (a lease of another runner, or not the
  /// planned step's), InvalidState (no step is planned), CudaError (also of a capture that the body
  /// broke), std::bad_alloc (a capture).
  template <class Body>
  void run(const SlotLease& lease, Stream stream, const Body& body, std::string_view piece = {}) {
    run_erased(
        lease, stream,
        [](const void* context, Stream s) { (*static_cast<const Body*>(context))(s); }, &body,
        piece);
  }

  bool is_captured(const SlotLease& lease, std::string_view piece = {}) const;
  /// Forgets every graph, to be captured anew. Waits for the streams that replay them, as the
  /// destructor does: they must outlive this object. Throws CudaError; the graphs are then kept.
  void clear();

 private:
  void run_erased(const SlotLease& lease, Stream stream, void (*body)(const void*, Stream),
                  const void* context, std::string_view piece);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla
