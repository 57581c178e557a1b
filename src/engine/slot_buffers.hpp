#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/staging.hpp"
#include "mla/kv_step.hpp"

namespace mla::engine {

/// The slots of new rows on a device that queues its work, where captured writes read them: one
/// buffer for each bucket, slot and label, at an address that stays.
class SlotBuffers {
 public:
  explicit SlotBuffers(device::Runtime& runtime) : runtime_(runtime) {}

  /// Stages each plan's slots; `out` gets a buffer for each plan, then those of the bucket's other
  /// labels, whose replayed writes must go nowhere. The first plan of a lease and label makes its
  /// buffer; what comes later allocates nothing. It gets none on a device that does its work at
  /// once or without a bucket: then the host's arrays are read. No plan has more slots than the
  /// bucket has tokens.
  void stage(const SlotLease& lease, std::span<const LabelPlan> plans, Stream stream,
             std::vector<device::StagedBuffer*>& out);

 private:
  struct Buffer {
    SlotLease lease;
    std::string label;
    device::StagedBuffer staged;
  };
  Buffer& find(const SlotLease& lease, std::string_view label, int64_t num_slots);

  device::Runtime& runtime_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

}  // namespace mla::engine
