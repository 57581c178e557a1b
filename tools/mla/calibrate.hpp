#pragma once

#include "mla/bench_device.hpp"

namespace mla::cli {

/// Measures what the planner's cost model asks of the kernels of a GPU: times batches whose workers
/// all have the same to do, fits the costs to them, and prints the lines for the library's table
/// with their residuals. Uses device, kernel, note, rounds and json of the options. Returns the
/// exit status. Throws UsageError (no kernel of that name that can be measured), InvalidArgument
/// (no such device).
int run_calibration(const DeviceBenchOptions& options);

}  // namespace mla::cli
