#include "engine/slot_buffers.hpp"

#include <algorithm>
#include <cstring>

namespace mla::engine {

SlotBuffers::SlotBuffers(Device device) : runtime_(device::runtime_of(device)) {}

bool SlotBuffers::stages(const SlotLease& lease) const {
  return lease.bucket.has_value() && !runtime_.is_immediate();
}

void SlotBuffers::stage(const SlotLease& lease, std::span<const LabelPlan> plans, Stream stream,
                        std::vector<device::StagedBuffer*>& out) {
  const auto write = [&](device::StagedBuffer& staged, std::span<const int64_t> slots) {
    std::memcpy(staged.begin_write(stream), slots.data(), slots.size_bytes());
    staged.end_write(slots.size_bytes(), stream);
    out.push_back(&staged);
  };
  for (const LabelPlan& plan : plans) write(find(lease, plan.label).staged, plan.slots);
  const std::vector<int64_t> none(static_cast<size_t>(lease.bucket->shape.num_tokens), -1);
  for (const auto& buffer : buffers_) {
    const bool planned = std::ranges::find(plans, buffer->label, &LabelPlan::label) != plans.end();
    if (!planned && buffer->lease == lease) write(buffer->staged, none);
  }
}

SlotBuffers::Buffer& SlotBuffers::find(const SlotLease& lease, std::string_view label) {
  for (const auto& buffer : buffers_) {
    if (buffer->lease == lease && buffer->label == label) return *buffer;
  }
  const auto num_slots = std::max<int64_t>(lease.bucket->shape.num_tokens, 1);
  buffers_.emplace_back(new Buffer{
      lease, std::string(label), {runtime_, static_cast<size_t>(num_slots) * sizeof(int64_t)}});
  return *buffers_.back();
}

}  // namespace mla::engine
