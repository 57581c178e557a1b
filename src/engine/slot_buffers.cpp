#include "engine/slot_buffers.hpp"

#include <algorithm>
#include <iterator>

namespace mla::engine {

void SlotBuffers::stage(const SlotLease& lease, std::span<const LabelPlan> plans, Stream stream,
                        std::vector<device::StagedBuffer*>& out) {
  out.clear();
  if (!lease.bucket || runtime_.is_immediate()) return;
  const int64_t num_slots = lease.bucket->shape.num_tokens;
  const auto write = [&](device::StagedBuffer& staged, std::span<const int64_t> slots) {
    auto* to = reinterpret_cast<int64_t*>(staged.begin_write(stream));
    std::fill_n(std::ranges::copy(slots, to).out, num_slots - std::ssize(slots), -1);
    staged.end_write(static_cast<size_t>(num_slots) * sizeof(int64_t), stream);
    out.push_back(&staged);
  };
  for (const LabelPlan& plan : plans) write(find(lease, plan.label, num_slots).staged, plan.slots);
  for (const auto& buffer : buffers_) {
    const bool planned = std::ranges::find(plans, buffer->label, &LabelPlan::label) != plans.end();
    if (!planned && buffer->lease == lease) write(buffer->staged, {});
  }
}

SlotBuffers::Buffer& SlotBuffers::find(const SlotLease& lease, std::string_view label,
                                       int64_t num_slots) {
  for (const auto& buffer : buffers_) {
    if (buffer->lease == lease && buffer->label == label) return *buffer;
  }
  const auto bytes = static_cast<size_t>(std::max<int64_t>(num_slots, 1)) * sizeof(int64_t);
  buffers_.emplace_back(new Buffer{lease, std::string(label), {runtime_, bytes}});
  return *buffers_.back();
}

}  // namespace mla::engine
