#include "device/staging.hpp"

#include "mla/error.hpp"

namespace mla::device {

StagedBuffer::StagedBuffer(Runtime& runtime, size_t bytes) : StagedBuffer(runtime) {
  // From here on the destructor gives back what is there, should what comes next throw.
  device_ = static_cast<std::byte*>(runtime.allocate(bytes));
  if (runtime.is_immediate()) return;
  for (Slot& slot : ring_) {
    slot.memory = static_cast<std::byte*>(runtime.allocate_staging(bytes));
    slot.copied = OwnedEvent(runtime);
  }
  read_ = OwnedEvent(runtime);
}

StagedBuffer::~StagedBuffer() {
  for (const Slot& slot : ring_) {
    if (slot.copied) quietly([&] { runtime_.wait_on_host(slot.copied.get()); });
    runtime_.release_staging(slot.memory);
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
  require_reader_outside_a_capture(stream, "PagedAttention::plan");
  Slot& slot = ring_[static_cast<size_t>(next_)];
  if (!runtime_.is_reached(slot.copied.get())) runtime_.wait_on_host(slot.copied.get());
  return slot.memory;
}

void StagedBuffer::end_write(size_t bytes, Stream stream) {
  if (runtime_.is_immediate()) return;
  // Readers on another stream: the copy goes behind all that is queued there by now.
  if (has_reader_ && read_on_ != stream) {
    runtime_.record(read_.get(), read_on_);
    runtime_.wait_on_stream(stream, read_.get());
  }
  // So does a copy that another stream has not done yet.
  if (last_ >= 0 && written_on_ != stream) {
    runtime_.wait_on_stream(stream, ring_[static_cast<size_t>(last_)].copied.get());
  }
  Slot& slot = ring_[static_cast<size_t>(next_)];
  runtime_.copy_to_device(device_, slot.memory, bytes, stream);
  runtime_.record(slot.copied.get(), stream);
  written_on_ = stream;
  has_reader_ = false;
  last_ = next_;
  next_ = (next_ + 1) % kDepth;
}

void StagedBuffer::order_readers(Stream stream) {
  if (runtime_.is_immediate() || last_ < 0 || runtime_.is_capturing(stream)) return;
  if (has_reader_ && read_on_ == stream) return;
  require_reader_outside_a_capture(stream, "PagedAttention::run");
  if (has_reader_) {  // a second reading stream: it goes behind the first, so that one event is
                      // enough
    runtime_.record(read_.get(), read_on_);
    runtime_.wait_on_stream(stream, read_.get());
  }
  if (stream != written_on_) {
    runtime_.wait_on_stream(stream, ring_[static_cast<size_t>(last_)].copied.get());
  }
  read_on_ = stream;
  has_reader_ = true;
}

void StagedBuffer::require_reader_outside_a_capture(Stream stream, const char* where) const {
  if (!has_reader_ || read_on_ == stream || !runtime_.is_capturing(read_on_)) return;
  throw_state({.what = "stream",
               .where = where,
               .expected =
                   "the stream of the latest run, or one outside a capture as the latest: an"
                   " event of that one would pull this one into the capture",
               .got = "another stream while that one is in a capture"});
}

}  // namespace mla::device
