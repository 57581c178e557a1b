#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mla/device.hpp"
#include "mla/export.hpp"
#include "mla/geometry.hpp"

namespace mla {

/// What one kernel of a device says to a shape.
struct KernelVerdict {
  std::string kernel;
  std::string refusal;  ///< empty where it accepts
};

/// Which kernel serves a shape.
struct Support {
  std::string kernel;       ///< empty where none can
  bool capturable = false;  ///< its launches may be captured in a graph
  /// It rounds probabilities to the cache's 16-bit dtype, for tensor cores.
  bool rounds_probabilities = false;
  std::string reason;                     ///< why this kernel, or why none
  std::vector<KernelVerdict> considered;  ///< the device's whole table, in order of preference

  explicit operator bool() const { return !kernel.empty(); }
};

/// Says before anything is launched which kernel will serve `geometry` on `device`, with caches of
/// these strides (none: one pool layer). A kernel named in `kernel` is asked alone. Never throws on
/// a shape: what is wrong with it is the reason. Allocates (std::bad_alloc). Queues nothing on the
/// device, but the first question about any CUDA device asks the driver for all of them, which may
/// initialise it and throw CudaError.
MLA_API Support supports(const Geometry& geometry, Device device = {},
                         std::optional<CacheStrides> strides = std::nullopt,
                         std::string_view kernel = {});

}  // namespace mla
