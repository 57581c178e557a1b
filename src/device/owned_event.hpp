#pragma once

#include <utility>

#include "device/runtime.hpp"

namespace mla::device {

/// An event that is given back with its owner.
class OwnedEvent {
 public:
  OwnedEvent() = default;  ///< none
  /// Throws CudaError. The runtime must outlive the event.
  explicit OwnedEvent(Runtime& runtime) : runtime_(&runtime), event_(runtime.create_event()) {}
  OwnedEvent(OwnedEvent&& other) noexcept
      : runtime_(std::exchange(other.runtime_, nullptr)), event_(other.event_) {}
  OwnedEvent& operator=(OwnedEvent&& other) noexcept {
    std::swap(runtime_, other.runtime_);
    std::swap(event_, other.event_);
    return *this;
  }
  ~OwnedEvent() {
    if (runtime_ != nullptr) runtime_->destroy_event(event_);
  }

  explicit operator bool() const { return runtime_ != nullptr; }
  Event get() const { return event_; }

 private:
  Runtime* runtime_ = nullptr;
  Event event_{};
};

}  // namespace mla::device
