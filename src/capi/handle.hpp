#pragma once

#include <cstdint>
#include <string_view>

#include "capi/from_c.hpp"

namespace mla::capi {

/// Base of what a handle T points to. Its mark tells a handle from a pointer to something else: a
/// handle of another type, memory that was never one, and mostly also a handle that was destroyed
/// (its memory is the allocator's by then, so that no more can be promised).
template <class T>
class Handle {
 public:
  Handle() = default;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  bool has_mark() const { return mark_ == mark(); }

 protected:
  ~Handle() { mark_ = 0; }

 private:
  static constexpr uint64_t mark() {  // FNV-1a of the type's name
    uint64_t hash = 0xcbf29ce484222325U;
    for (const char c : std::string_view(T::kName)) {
      hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
    }
    return hash;
  }

  // Volatile: the destructor's store would be left out otherwise.
  volatile uint64_t mark_ = mark();
};

[[noreturn]] void refuse_handle(const char* type, const char* name, const char* where);

template <class T>
bool is_handle(const T* handle) {
  return handle != nullptr && handle->has_mark();
}

/// What the handle points to. Throws InvalidArgument (null, or not a handle of this type).
template <class T>
T& handle_from_c(T* handle, const char* name, const char* where) {
  if (not_null(handle, name, where).has_mark()) return *handle;
  refuse_handle(T::kName, name, where);
}

/// Takes null, and leaves alone what is not a handle of this type.
template <class T>
void destroy(T* handle) {
  if (is_handle(handle)) delete handle;
}

}  // namespace mla::capi
