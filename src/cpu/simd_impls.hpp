#pragma once

#include <cstdint>

#include "core/attention_impl.hpp"

// The fast kernel (attention-inl.hpp), once for each instruction set of this architecture.
namespace mla::cpu {

/// Loops that run into one limit of the machine each (machine_limits.hpp).
struct MachineProbes {
  /// Multiply-adds in registers; returns the flop done.
  double (*multiply_add)(int64_t rounds, float* sink) = nullptr;
  /// Reads `count` floats, a multiple of 128, 64-byte aligned.
  void (*read)(const float* from, int64_t count, float* sink) = nullptr;
};

#if defined(__x86_64__)
extern const AttentionImpl kAvx512Impl;
extern const AttentionImpl kAvx2Impl;
extern const MachineProbes kAvx512Probes;
extern const MachineProbes kAvx2Probes;
#elif defined(__aarch64__)
extern const AttentionImpl kNeonImpl;
extern const MachineProbes kNeonProbes;
#endif
/// One number at a time, in the architecture's baseline.
extern const AttentionImpl kScalarImpl;
extern const MachineProbes kScalarProbes;

/// How fast one instruction set runs the kernel on a thread, as measured.
struct KernelSpeed {
  double fma_per_ns = 0;      ///< fp32 multiply-adds, from row to row of a tile
  double widen_per_ns = 0;    ///< cached elements, whatever the rows
  double partial_per_ns = 0;  ///< columns of one more part of a row: packed, written, merged
};

plan::CostModel simd_cost_model(const Geometry& geometry, int32_t lanes, const KernelSpeed& speed);

/// Null where this CPU and its operating system have what the copies are compiled for, else what is
/// missing. No more is asked than that.
const char* avx512_missing();
const char* avx2_missing();
/// Of an instruction set that every machine of its architecture has.
inline const char* nothing_missing() { return nullptr; }

}  // namespace mla::cpu
