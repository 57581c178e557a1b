#include "cases/random.hpp"

// Stands for random.cu in a build without CUDA, which has no device to ask for it.
void mla::cases::fill_uniform_rows(const uint64_t*, int64_t, DType, void*, int64_t, Device,
                                   Stream) {}
