#include "device/staging.hpp"

#include "mla/error.hpp"

namespace mla::device {

StagedBuffer::StagedBuffer(Runtime& runtime, size_t bytes)
    : runtime_(runtime), device_(static_cast<std::byte*>(runtime.allocate(bytes))) {
  if (runtime.is_immediate()) return;
  for (Slot& slot : ring_) {
    slot = {.memory = static_cast<std::byte*>(runtime.allocate_staging(bytes)),
            .copied = runtime.create_event()};
  }
  read_ = runtime.create_event();
}

StagedBuffer::~StagedBuffer() {
  if (!runtime_.is_immediate()) {
    for (Slot& slot : ring_) {
      runtime_.wait_on_host(slot.copied);
      runtime_.destroy_event(slot.copied);
      runtime_.release_staging(slot.memory);
    }
    runtime_.destroy_event(read_);
  }
  runtime_.release(device_);
}

std::byte* StagedBuffer::begin_write(Stream stream) {
  if (runtime_.is_immediate()) return device_;
  if (runtime_.is_capturing(stream)) {
    throw_state(
        {.what = "stream",
         .where = "PagedAttention::plan",
         .expected = "a stream that is not in a capture: a replay would copy this plan again",
         .got = "one that is"});
  }
  Slot& slot = ring_[static_cast<size_t>(next_)];
  if (!runtime_.is_reached(slot.copied)) runtime_.wait_on_host(slot.copied);
  return slot.memory;
}

void StagedBuffer::end_write(size_t bytes, Stream stream) {
  if (runtime_.is_immediate()) return;
  // Readers on another stream: the copy goes behind all that is queued there by now.
  if (has_reader_ && read_on_ != stream) {
    runtime_.record(read_, read_on_);
    runtime_.wait_on_stream(stream, read_);
  }
  // So does a copy that another stream has not done yet.
  if (last_ >= 0 && written_on_ != stream) {
    runtime_.wait_on_stream(stream, ring_[static_cast<size_t>(last_)].copied);
  }
  Slot& slot = ring_[static_cast<size_t>(next_)];
  runtime_.copy_to_device(device_, slot.memory, bytes, stream);
  runtime_.record(slot.copied, stream);
  written_on_ = stream;
  has_reader_ = false;
  last_ = next_;
  next_ = (next_ + 1) % kDepth;
}

void StagedBuffer::order_readers(Stream stream) {
  if (runtime_.is_immediate() || last_ < 0 || runtime_.is_capturing(stream)) return;
  if (has_reader_ && read_on_ == stream) return;
  if (has_reader_) {  // a second reading stream: it goes behind the first, so that one event is
                      // enough
    runtime_.record(read_, read_on_);
    runtime_.wait_on_stream(stream, read_);
  }
  if (stream != written_on_) {
    runtime_.wait_on_stream(stream, ring_[static_cast<size_t>(last_)].copied);
  }
  read_on_ = stream;
  has_reader_ = true;
}

}  // namespace mla::device
