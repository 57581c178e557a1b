#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/copy_async.cuh"

// The PTX of sm_90a that the Hopper kernels need, one function per instruction. Shared memory is
// named by its 32-bit address in the shared window (`shared_address`). What the instructions do is
// told in the PTX ISA; here stands what a caller must know of each.
namespace mla::cuda::sm90 {

// Barriers in shared memory. A phase ends when `count` arrivals have come; phases are told apart by
// their parity, 0 for the first.

__device__ inline void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/// Makes barriers just initialised visible to every thread's later use of them.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives, and the phase waits for so many bytes of copy_box() too.
__device__ inline void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// Arrives once all of this thread's earlier copy_async() are done; counts as one arrival.
__device__ inline void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// The address by which blocks of a cluster name `address` of the shared memory of the cluster's
/// block `rank`.
__device__ inline uint32_t address_in_cluster(uint32_t address, uint32_t rank) {
  uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

/// Arrives at a barrier of any block of the cluster, named by address_in_cluster().
__device__ inline void barrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Waits until the phase of this parity has ended.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Whether the phase of this parity has ended; does not wait.
__device__ inline bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.b32 %0, 1, 0, ended;\n"
      "}\n"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

/// All threads of all blocks of the cluster.
__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;\n" ::
          : "memory");
}

// Copies to shared memory.

/// A policy of the level-2 cache: first to leave it. For what is read once, so that it does not
/// displace what was written to be read again.
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// A box of a tensor, in the tensor's own swizzle; its bytes count towards the phase of `barrier`.
/// The tensor is [pages, groups of rows, strips, rows of a group, columns]. One thread issues it.
/// `policy`: of the level-2 cache.
struct BoxAt {
  int32_t column, row, strip, row_group, page;
};
__device__ inline void copy_box(uint32_t to, const CUtensorMap& tensor, BoxAt at, uint32_t barrier,
                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(&tensor), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.strip), "r"(at.row_group),
      "r"(at.page), "l"(policy)
      : "memory");
}
/// The same, to the same place and barrier of every block of the cluster in `blocks`, a bit a rank.
__device__ inline void copy_box_to_cluster(uint32_t to, const CUtensorMap& tensor, BoxAt at,
                                           uint32_t barrier, uint16_t blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(to),
      "l"(&tensor), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.strip), "r"(at.row_group),
      "r"(at.page), "h"(blocks), "l"(policy)
      : "memory");
}
/// Has the box come to the level-2 cache.
__device__ inline void prefetch_box(const CUtensorMap& tensor, BoxAt at, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global.tile.L2::cache_hint "
      "[%0, {%1, %2, %3, %4, %5}], %6;" ::"l"(&tensor),
      "r"(at.column), "r"(at.row), "r"(at.strip), "r"(at.row_group), "r"(at.page), "l"(policy)
      : "memory");
}
__device__ inline void prefetch_tensor(const CUtensorMap& tensor) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&tensor) : "memory");
}

/// 8 or 16 bytes to global memory where `condition` holds, without a branch: the compiler guards
/// each shuffle behind one.
__device__ inline void store_if(bool condition, void* to, uint2 value) {
  asm volatile(
      "{\n"
      ".reg .pred stores;\n"
      "setp.ne.u32 stores, %0, 0;\n"
      "@stores st.global.v2.b32 [%1], {%2, %3};\n"
      "}\n" ::"r"(static_cast<uint32_t>(condition)),
      "l"(to), "r"(value.x), "r"(value.y)
      : "memory");
}
__device__ inline void store_if(bool condition, void* to, float4 value) {
  asm volatile(
      "{\n"
      ".reg .pred stores;\n"
      "setp.ne.u32 stores, %0, 0;\n"
      "@stores st.global.v4.f32 [%1], {%2, %3, %4, %5};\n"
      "}\n" ::"r"(static_cast<uint32_t>(condition)),
      "l"(to), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

__device__ inline void store_shared(uint32_t to, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

/// Stores four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix
/// l / 8 and holds, of each matrix, elements 2 * (l % 4) and the next of row l / 4.
__device__ inline void store_matrices(uint32_t row, const uint32_t (&values)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

/// Orders this thread's view of shared memory, as ordinary instructions see it, before later
/// accesses of the tensor cores.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Registers of the warpgroup's threads: a multiple of 8. The kernel needs __launch_bounds__ with a
// minimum of one block.

template <int kCount>
__device__ inline void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Warpgroup matrix products: D [64, N] fp32 += A [64, 16] B [16, N]. Thread t of the warpgroup
// (warp w, lane l) holds of D, for every 8 columns c: d[c/2 + 0, 1] of row 16 w + l/4 and
// d[c/2 + 2, 3] of the row 8 below, columns c + 2 (l % 4) and the next. A in registers: the same
// rows, four packed pairs at columns 2 (l % 4) of row l/4, of row l/4 + 8, and 8 columns on.

/// A value that is the same in all lanes, in a register of the warp: what descriptors are made of.
__device__ inline uint32_t uniform(uint32_t value) { return __reduce_or_sync(0xffffffff, value); }

/// A matrix in shared memory: rows of 64 16-bit elements (128 bytes), the 16-byte chunk c of row r
/// at position c ^ (r % 8), eight rows in 1,024 aligned bytes. `row_stride`: bytes from eight rows
/// to the next eight. `wide_stride`: from 64 columns to the next 64, used where the product runs
/// along the rows (B as [16 rows, N columns]).
__device__ inline uint64_t matrix_descriptor(uint32_t address, uint32_t row_stride = 1024,
                                             uint32_t wide_stride = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint32_t kAddressBits = 0x3ffff;
  return kSwizzle128 | (uint64_t{row_stride >> 4} << 32) | (uint64_t{wide_stride >> 4} << 16) |
         ((address & kAddressBits) >> 4);
}

/// The descriptor of the matrix `bytes` further on; its upper half stays as it is.
__device__ inline uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & ~uint64_t{0xffffffff}) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

/// 2^x, with a relative error of 2^-22; results below 2^-126 are 0.
__device__ inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Two elements, rounded to nearest even, the first in the lower half.
template <class T>
__device__ inline uint32_t pack(float first, float second) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

/// Before the first product of a group: registers written before are seen by it.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `kPending` committed groups are under way.
template <int kPending>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// The compiler takes a product for done where it is issued. This, after the wait, keeps it from
/// reading `d` before.
template <int kCount>
__device__ inline void products_arrive(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// One instruction each; the element type is the only difference between two of them.
// clang-format off
#define MLA_SCORES_PRODUCT(TYPE) \
  asm volatile( \
      "{\n.reg .pred accumulate;\n" \
      "setp.ne.b32 accumulate, %34, 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
      "%32, %33, accumulate, 1, 1, 0, 0;\n}\n" \
      : \
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

// The 128 sums of a thread, as the instruction names them and as operands of an asm statement.
#define MLA_SUMS_128 \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "

#define MLA_SUM_OPERANDS_128 \
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define MLA_VALUES_PRODUCT(TYPE) \
  asm volatile( \
      "{\n.reg .pred accumulate;\n" \
      "setp.ne.b32 accumulate, %130, 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " " \
      MLA_SUMS_128 \
      "%128, %129, accumulate, 1, 1, 0, 1;\n}\n" \
      : \
        MLA_SUM_OPERANDS_128 \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

#define MLA_VALUES_PRODUCT_REGISTERS(TYPE) \
  asm volatile( \
      "{\n.reg .pred accumulate;\n" \
      "setp.ne.b32 accumulate, %133, 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " " \
      MLA_SUMS_128 \
      "{%128, %129, %130, %131}, %132, accumulate, 1, 1, 1;\n}\n" \
      : \
        MLA_SUM_OPERANDS_128 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))
// clang-format on

/// d (+)= a b with b [16, 64] stored as its transpose, [64 rows, 16 columns].
template <class T>
__device__ inline void multiply_scores(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    MLA_SCORES_PRODUCT("bf16");
  } else {
    MLA_SCORES_PRODUCT("f16");
  }
}

/// d += a b with b [16, 256] stored as [16 rows, 256 columns]; a in shared memory.
template <class T>
__device__ inline void multiply_values(float (&d)[128], uint64_t a, uint64_t b) {
  constexpr bool accumulate = true;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    MLA_VALUES_PRODUCT("bf16");
  } else {
    MLA_VALUES_PRODUCT("f16");
  }
}

/// The same with a in registers.
template <class T>
__device__ inline void multiply_values(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  constexpr bool accumulate = true;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    MLA_VALUES_PRODUCT_REGISTERS("bf16");
  } else {
    MLA_VALUES_PRODUCT_REGISTERS("f16");
  }
}

#undef MLA_SCORES_PRODUCT
#undef MLA_SUMS_128
#undef MLA_SUM_OPERANDS_128
#undef MLA_VALUES_PRODUCT
#undef MLA_VALUES_PRODUCT_REGISTERS

}  // namespace mla::cuda::sm90
