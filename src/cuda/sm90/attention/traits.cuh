#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/merge_rows.cuh"
#include "cuda/rows.cuh"

// What is fixed at compile time of the dense Hopper attention kernel, and what a launch gives it.
// The schedule is drawn in docs/kernels/sm90.md.
namespace mla::cuda::sm90 {

/// `T`: element type of q, cache and out. `kRopeColumns`: 64 or 0. `kBlocksOfWorker`: 2 where a
/// tile has up to 128 rows, of which blocks 2w and 2w + 1 take 64 each, side by side, so that the
/// keys come from memory once; else 1.
template <class T, int kRopeColumns, int kBlocksOfWorker>
struct AttentionTraits {
  using Element = T;

  static constexpr int kBlocks = kBlocksOfWorker;
  static constexpr int kRows = 64;   // query rows of a block (CTA)
  static constexpr int kKeys = 64;   // keys of one step
  static constexpr int kRank = 512;  // columns of ckv, the values
  static constexpr int kRope = kRopeColumns;

  // Matrices in shared memory are cut into strips of 64 columns, and these into atoms of the
  // swizzle, [8 rows, 128 bytes]. Where the atoms lie: QueryLayout, KeyLayout.
  static constexpr int kStripColumns = 64;
  static constexpr int kRowBytes = 128;
  static constexpr int kAtomRows = 8;
  static constexpr int kAtomBytes = kAtomRows * kRowBytes;
  static constexpr int kStripBytes = kRows * kRowBytes;
  static constexpr int kValueStrips = kRank / kStripColumns;
  static constexpr int kStrips = kValueStrips + kRope / kStripColumns;

  // The value columns are halved between two warpgroups; keys come and go in the same halves, the
  // rope strip with the second. The group that leads a step asks for its own half first.
  static constexpr int kHalves = 2;
  static constexpr int kHalfStrips = kValueStrips / kHalves;
  static constexpr int kHalfColumns = kRank / kHalves;
  static constexpr int kHalfBytes = kHalfStrips * kStripBytes;

  static constexpr int kStages = 2;  // blocks of keys in shared memory

  static constexpr int kGroupThreads = 128;           // a warpgroup
  static constexpr int kThreads = 3 * kGroupThreads;  // math left, math right, load
  static constexpr int kMathThreads = 2 * kGroupThreads;
  // 65,536 registers over 3 x 128 threads.
  static constexpr int kLoadRegisters = 56;
  static constexpr int kMathRegisters = 224;

  using MergedRows = RowsOf<T, kRank>;
};

/// Queries: strip after strip. `strip(s)`: bytes to the first rows of strip s. `row_stride(s)`:
/// from eight rows of it to the next eight.
template <class Traits>
struct QueryLayout {
  __host__ __device__ static constexpr int strip(int s) { return s * Traits::kStripBytes; }
  __host__ __device__ static constexpr int row_stride(int /*s*/) { return Traits::kAtomBytes; }
};

/// Keys: half after half of the value strips, then the rope strip. In a half eight rows of all of
/// its strips come before the next eight, so that one box holds all that it has of a page.
template <class Traits>
struct KeyLayout {
  static constexpr int kHalfRowStride = Traits::kHalfStrips * Traits::kAtomBytes;
  static constexpr int kRopeStrip = Traits::kHalves * Traits::kHalfBytes;

  __host__ __device__ static constexpr int strip(int s) {
    return s == Traits::kValueStrips ? kRopeStrip
                                     : s / Traits::kHalfStrips * Traits::kHalfBytes +
                                           s % Traits::kHalfStrips * Traits::kAtomBytes;
  }
  __host__ __device__ static constexpr int row_stride(int s) {
    return s == Traits::kValueStrips ? Traits::kAtomBytes : kHalfRowStride;
  }
};

/// Named barriers, by the event that each announces.
enum NamedBarrier : int {
  kRowsClearedLeft = 1,
  kRowsClearedRight,
  kKeysSeenLeft,
  kKeysSeenRight,
  kTilesStored,
  kPartsStored
};

/// Shared memory of a block. The matrices are aligned to 1,024 bytes, as their swizzle is.
template <class Traits>
struct SharedStorage {
  // Merges come when all tiles are done.
  union {
    std::byte queries[Traits::kStrips * Traits::kStripBytes];
    MergedSums<4> sums;
  };
  union {
    std::byte keys[Traits::kStages][Traits::kStrips * Traits::kStripBytes];
    MergedPairs<typename Traits::MergedRows> pairs[Traits::kMathThreads / 32];
  };
  std::byte weights[Traits::kStripBytes];  // [rows, keys], of the block under way
  float row_max[Traits::kRows];            // running maximum, up to that block or the next
  float row_sum[2][Traits::kHalves][Traits::kRows];  // of a tile's weights, by who formed them
  uint64_t keys_full[Traits::kStages][Traits::kHalves];
  uint64_t keys_free[Traits::kStages][Traits::kHalves];
  uint64_t queries_full;
  uint64_t queries_free;
  uint64_t weights_full[Traits::kHalves];  // by who formed them
  uint64_t max_full;                       // of the left group, where it comes ahead of weights
  uint64_t sums_full;
  uint32_t steps_asked;  // of keys, by the warp that loads them
};

inline constexpr int kSharedAlignment = 1024;
inline constexpr int kSharedLimitBytes = 227 * 1024;  // of one block on sm_90

/// How keys come to shared memory.
enum class KeyLoads : int32_t {
  kElements,  ///< one by one: any address
  kChunks,    ///< 16 bytes a thread: any page size
  kBoxes,     ///< up to 64 rows of a page at once, by the copy engine
};

/// The kernel's argument.
struct AttentionArgs : KernelParams {
  CUtensorMap ckv_boxes{};  ///< [pages, eights of rows, strips, 8 rows, 64 columns]
  CUtensorMap kpe_boxes{};  ///< the same, one strip
  KeyLoads key_loads = KeyLoads::kElements;
  /// The two blocks of a worker are a cluster, and each brings one half of the keys to both.
  bool is_cluster = false;
  // Whether 16-byte (out: 8-byte) accesses are aligned; else elements are moved one by one.
  bool queries_aligned = false;
  bool out_aligned = false;
  /// The launch is cooperative: its blocks merge the partial results when all are there.
  bool may_merge = false;
};

}  // namespace mla::cuda::sm90
