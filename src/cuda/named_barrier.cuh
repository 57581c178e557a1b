#pragma once

namespace mla::cuda {

/// Waits at the block's barrier `id`, 1 to 15, until `threads` of its threads are there, and makes
/// visible to each what the others wrote to memory before. Whole warps come, each from its own
/// place in the code: without `.aligned` PTX allows that; of __syncthreads (barrier 0) it does not.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace mla::cuda
