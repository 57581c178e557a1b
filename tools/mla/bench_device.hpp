#pragma once

#include <string>

#include "mla/device.hpp"
#include "mla/output.hpp"

namespace mla::cli {

struct DeviceBenchOptions {
  Device device{};
  std::string filter;  ///< of "group: name"
  std::string kernel;  ///< empty: the first that accepts
  std::string note;    ///< goes into the JSON
  int rounds = 5;
  JsonTarget json{};
};

/// Times attention on an accelerator: every shape of gpu_bench_shapes() is checked against the
/// reference on a few rows, then captured over caches that are together several times the level-2
/// cache, and replayed. Returns the exit status.
int run_device_bench(const DeviceBenchOptions& options);

}  // namespace mla::cli
