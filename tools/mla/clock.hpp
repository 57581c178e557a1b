#pragma once

#include <chrono>

namespace mla::cli {

/// Seconds of a clock that only goes forward.
inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace mla::cli
