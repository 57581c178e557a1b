#pragma once

#include <cstdint>

#include "core/attention_impl.hpp"

// The fast kernel (attention-inl.hpp), once for each instruction set of this architecture.
namespace mla::cpu {

#if defined(__x86_64__)
extern const AttentionImpl kAvx512Impl;
extern const AttentionImpl kAvx2Impl;
#elif defined(__aarch64__)
extern const AttentionImpl kNeonImpl;
#endif
/// Vectors of 4 without any instruction beyond the architecture's baseline.
extern const AttentionImpl kScalarImpl;

/// How fast one instruction set runs the kernel on a thread, as measured.
struct KernelSpeed {
  double fma_per_ns = 0;      ///< fp32 multiply-adds of rows that fill their vectors
  double widen_per_ns = 0;    ///< cached elements widened
  double tile_row_ns = 0;     ///< start and end of a row, per 1,000 columns
  double partial_per_ns = 0;  ///< fp32 values of a partial result written, read and merged
};

plan::CostModel simd_cost_model(const Geometry& geometry, int32_t lanes, const KernelSpeed& speed);

/// Null where this CPU and its operating system have what the copies are compiled for, else what is
/// missing. No more is asked than that.
const char* avx512_missing();
const char* avx2_missing();

}  // namespace mla::cpu
