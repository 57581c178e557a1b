#pragma once

#include <cstdint>

// A barrier of all blocks of a launch, for launches that are known to be on the device as a whole
// (cooperative ones).
namespace mla::cuda {

/// Where a block stands at the barrier between its arrival and its wait.
struct GridArrival {
  uint32_t* barrier;
  uint32_t seen;  // of *barrier, just before it came
};

/// One thread of each block comes. What the block wrote before it synchronised with this thread is
/// visible to whoever waits. `barrier` is zero or as earlier rounds left it: the arrivals of one
/// round add up to 2^31, so its top bit flips and the others are as they were. It may be set to
/// zero between launches, never during one.
__device__ inline GridArrival arrive_at_grid(uint32_t* barrier) {
  const uint32_t count = blockIdx.x == 0 ? 0x80000000U - (gridDim.x - 1) : 1;
  __threadfence();
  return {barrier, atomicAdd(barrier, count)};
}

/// Returns when all blocks have come.
__device__ inline void wait_for_grid(const GridArrival& arrival) {
  uint32_t now = 0;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(now)
                 : "l"(arrival.barrier)
                 : "memory");
  } while (((now ^ arrival.seen) & 0x80000000U) == 0);
}

}  // namespace mla::cuda
