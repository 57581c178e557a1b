#pragma once

#include <cstdint>

// Copies to shared memory that a thread asks for and does not wait for (compute capability 8.0).
// Source: PTX ISA, section "cp.async".
namespace mla::cuda {

/// Address in shared memory, as the instructions take it.
__device__ inline uint32_t shared_address(const void* memory) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(memory));
}

/// 16 bytes from global memory, past the level-1 cache; zeros where `valid` is false, and then
/// `from` is not read. Both addresses are multiples of 16. It takes no policy of the level-2 cache:
/// the compiler of CUDA 13.0 may put one where the instruction is illegal.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

/// Ends a group of copies.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending groups of this thread are under way.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// The same for a number known at run time, 0 to kMost.
template <int kMost>
__device__ void wait_for_all_but(int pending) {
  if constexpr (kMost == 0) {
    wait_for_copies<0>();
  } else if (pending >= kMost) {
    wait_for_copies<kMost>();
  } else {
    wait_for_all_but<kMost - 1>(pending);
  }
}

}  // namespace mla::cuda
