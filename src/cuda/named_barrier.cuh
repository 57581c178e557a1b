#pragma once

#include <cstdint>

namespace mla::cuda {

/// Waits at the block's barrier `id`, 1 to 15, until `threads` of its threads are there, and makes
/// visible to each what the others wrote to memory before. Whole warps come, each from its own
/// place in the code: without `.aligned` PTX allows that; of __syncthreads (barrier 0) it does not.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// The same; returns whether `value` holds in all of them.
__device__ inline bool named_barrier_all(int id, int threads, bool value) {
  uint32_t all = 0;
  asm volatile(
      "{\n"
      ".reg .pred own, every;\n"
      "setp.ne.u32 own, %3, 0;\n"
      "barrier.cta.red.and.pred every, %1, %2, own;\n"
      "selp.u32 %0, 1, 0, every;\n"
      "}"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(value))
      : "memory");
  return all != 0;
}

}  // namespace mla::cuda
