#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "cuda/general/mma.cuh"
#include "cuda/general/tile_shape.hpp"
#include "cuda/named_barrier.cuh"
#include "cuda/rows.cuh"

// What the two roles of the tensor-core kernel share: its parameters, its shared memory and its
// barrier.
namespace mla::cuda::general::tensor_core {

constexpr int kWarp = 32;
constexpr int kScoreWarps = 4;  // one on each scheduler of a multiprocessor
constexpr int kValueWarps = 8;
constexpr int kThreads = (kScoreWarps + kValueWarps) * kWarp;
constexpr int kRowTile = 16;  // rows of one mma
constexpr int kChunk = 8;     // elements of 16 bytes
constexpr int kMeeting = 1;   // the number of the roles' barrier
constexpr uint32_t kAllLanes = 0xffffffff;

/// floor(value / divisor) of 0 <= value < 2^31 for one divisor, 1 to 2^31 - 1, by a multiplication:
/// the factor is above 2^shift / divisor by less than one part in 2^31, which the floor hides.
class Divider {
 public:
  Divider() = default;
  explicit Divider(int32_t divisor)
      : shift_(31 + std::bit_width(static_cast<uint32_t>(divisor - 1))),
        factor_(((uint64_t{1} << shift_) - 1) / static_cast<uint64_t>(divisor) + 1) {}

  __device__ int32_t operator()(int32_t value) const {
    return static_cast<int32_t>(static_cast<uint64_t>(value) * factor_ >> shift_);
  }

 private:
  int32_t shift_ = 0;
  uint64_t factor_ = 1;
};

struct Params {
  KernelParams launch{};
  TileShape shape{};
  Divider by_page_size;
  bool wide_queries = false;  ///< rows of the tensors can be read in units of 16 bytes
  bool wide_cache = false;
  bool paired_out = false;  ///< out can be written two values at a time
};

/// The shared memory of a block. Weights and factors of two blocks of keys: the one that the value
/// warps collect and the one that the score warps make.
struct Shared {
  std::byte* queries;
  std::byte* keys;
  std::byte* weights;  // of a row: those of even blocks, those of odd ones
  float* factors;      // [2][64]
  float* maxima;       // [group of keys][row], 64 in all
  float* sums;         // the same, at the end of a tile
  float* largest;      // [64], at the end of a tile
  int* moves;          // [2][4], of row tiles: whether any factor is not 1

  __device__ Shared(std::byte* memory, const TileShape& shape)
      : queries(memory),
        keys(memory + shape.keys_at),
        weights(memory + shape.weights_at),
        factors(reinterpret_cast<float*>(memory + shape.statistics_at)),
        maxima(factors + 2 * kMaxTileRows),
        sums(maxima + kMaxTileRows),
        largest(sums + kMaxTileRows),
        moves(reinterpret_cast<int*>(largest + kMaxTileRows)) {}
};

/// Bytes from the start of row `row` to its 16-byte chunk `chunk`.
__device__ inline uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
  return (chunk ^ (row % 8)) * 16;
}

/// The address of the chunk 2 * count after one at `address` whose number has none of the bits of
/// 2 * count; an exclusive or, as in chunk_offset, since rows start at multiples of 128 bytes.
__device__ inline uint32_t two_chunks_on(uint32_t address, int count) {
  return (address + count / 4 * 128) ^ (count % 4 * 32);
}

/// A tile's rows, and how many keys it takes at a time.
template <int kRowTilesOfIt, int kColumnTilesOfIt>
struct TileTraits {
  static constexpr int kRowTiles = kRowTilesOfIt;        // of 16
  static constexpr int kColumnTiles = kColumnTilesOfIt;  // of 8, of one value warp
  static constexpr int kRows = kRowTiles * kRowTile;
  static constexpr int kBlockKeys = block_keys(kColumnTiles * kValueWarps * 8, kRows);
  static constexpr int kWeightRowBytes = 2 * kBlockKeys * 2;  // of two blocks

  // How the score warps share out a block: row tiles, and groups of keys.
  static constexpr int kGroups = kScoreWarps / kRowTiles;
  static constexpr int kKeyTiles = kBlockKeys / kGroups / 8;  // of 8 keys, of one warp
};

/// The thread's number in the block, read anew at each call: what the compiler computes from it
/// ahead of a loop costs registers that the output needs.
__device__ inline uint32_t thread_anew() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// Where all warps wait for each other, each at its own place in the code of its role.
__device__ inline void meet() { named_barrier_sync(kMeeting, kThreads); }

}  // namespace mla::cuda::general::tensor_core
