#pragma once

#include <string_view>

#include "mla/executor.hpp"
#include "mla/export.hpp"

namespace mla::cpu {

/// What this machine can do at most, all threads of an executor at once: the roofs that the
/// kernel's speed is given against.
struct MachineLimits {
  int threads = 0;
  double fma_gflops = 0;      ///< fp32 multiply-adds in registers, GFLOP/s
  double dram_read_gbps = 0;  ///< memory that no cache holds, GB/s
  double l2_read_gbps = 0;    ///< 1 MiB a thread, read again and again, GB/s
};

/// Measures each limit for about 0.2 s, best of several rounds, with vectors of the instruction set
/// of the kernel of that name (cpu_avx512, cpu_avx2, cpu_neon, cpu_scalar; any other: scalar). It
/// must be one that this CPU has. Allocates 512 MiB meanwhile; blocks for about 1 s.
MLA_API MachineLimits measure_limits(std::string_view kernel, Executor& executor);

/// The first of them alone.
MLA_API double measure_fma_gflops(std::string_view kernel, Executor& executor);

}  // namespace mla::cpu
