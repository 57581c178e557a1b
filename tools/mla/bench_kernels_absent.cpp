#include "mla/bench_kernels.hpp"

// Stands for bench_kernels.cu in a build without CUDA, which has no device to ask for them.
namespace mla::cli {

void queue_page_reads(const ReadParts&, const void*, Device, Stream) {}

void queue_read(const void*, size_t, Device, Stream) {}

void queue_nothing(Device, Stream) {}

}  // namespace mla::cli
