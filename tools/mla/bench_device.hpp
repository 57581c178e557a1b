#pragma once

#include <string>
#include <vector>

#include "cuda/card.hpp"
#include "mla/device.hpp"
#include "mla/output.hpp"

namespace mla::cli {

struct DeviceBenchOptions {
  Device device{};
  std::string filter;              ///< of "group: name"
  std::string kernel;              ///< empty: the first that accepts
  std::string note;                ///< goes into the JSON
  std::vector<std::string> peers;  ///< files of libraries behind peer.h
  int rounds = 5;
  JsonTarget json{};
};

/// What the JSON of every measurement on a card begins with: the card, versions, the date, the
/// note.
Json header_of(const DeviceBenchOptions& options, const cuda::Card& card);

/// Times attention on an accelerator: every shape of gpu_bench_shapes() is checked against the
/// reference on a few rows, then timed with the peers in turn (time_cell). Returns the exit status.
/// Throws UsageError (filter, peers), InvalidArgument (no such device).
int run_device_bench(const DeviceBenchOptions& options);

}  // namespace mla::cli
