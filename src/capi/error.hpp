#pragma once

#include "mla/mla.h"

namespace mla::capi {

/// Keeps the text of the exception that is being handled for mla_last_error() of this thread, and
/// gives the status that stands for it. Only inside a catch block.
mla_status keep_current_exception() noexcept;

/// Runs the body of a C call: whatever it throws becomes a status and a text.
template <class Fn>
mla_status guard(const Fn& fn) noexcept {
  try {
    fn();
    return MLA_OK;
  } catch (...) {
    return keep_current_exception();
  }
}

}  // namespace mla::capi
