#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/device.hpp"
#include "mla/page_reads.hpp"

namespace mla::cli {

/// What queue_page_reads reads: a ReadList with its runs on the device.
struct ReadParts {
  const ReadRun* runs = nullptr;
  int32_t num_parts = 0;
  int32_t runs_of_a_part = 0;
  int32_t most_units = 0;
};

// Kernels that the benchmark holds attention against, for CUDA devices alone. They queue work on
// the stream and may be captured. Throw CudaError.

/// Reads every run once and does nothing with it: by bulk copies into a ring in shared memory, one
/// block on each multiprocessor; by plain loads where the card has no bulk copies.
void queue_page_reads(const ReadParts& parts, const void* base, Device device, Stream stream);

/// Reads `bytes`, a multiple of 16, that lie together.
void queue_read(const void* data, size_t bytes, Device device, Stream stream);

/// One block that does nothing.
void queue_nothing(Device device, Stream stream);

}  // namespace mla::cli
