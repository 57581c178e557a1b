#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/general/tile_shape.hpp"
#include "cuda/rows.cuh"

// What the stages of the tensor-core kernel share: its parameters and its shared memory.
namespace mla::cuda::general::tensor_core {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRowTile = 16;  // rows of one mma
constexpr int kChunk = 8;     // elements of 16 bytes
constexpr uint32_t kAllLanes = 0xffffffff;

struct Params {
  KernelParams launch{};
  TileShape shape{};
  bool wide_queries = false;  ///< rows of the tensors can be read in units of 16 bytes
  bool wide_cache = false;
  bool paired_out = false;  ///< out can be written two values at a time
};

/// Where a row of [ckv | kpe] lies in two tensors, in elements; zeros stand for a row that is not
/// there.
struct Source {
  int64_t ckv_at = -1;  // -1: not there
  int64_t kpe_at = -1;
};

/// The shared memory of a block.
struct Shared {
  std::byte* queries;
  std::byte* keys;
  std::byte* weights;
  Source* sources;  // [warp][8], of the rows that it copies
  float* maxima;    // [group of keys][row], 128 in all; at the end the sums
  float* factors;   // [64]
  float* largest;   // [64], at the end

  __device__ Shared(std::byte* memory, const TileShape& shape)
      : queries(memory),
        keys(queries + shape.tile_rows * shape.row_bytes),
        weights(keys + shape.num_stages * shape.block_keys * shape.row_bytes),
        sources(reinterpret_cast<Source*>(weights + shape.tile_rows * kWeightRowBytes)),
        maxima(reinterpret_cast<float*>(sources + kMaxTileRows)),
        factors(maxima + 2 * kMaxTileRows),
        largest(factors + kMaxTileRows) {}
};

/// Bytes from the start of row `row` to its 16-byte chunk `chunk`.
__device__ inline int chunk_offset(int row, int chunk) { return (chunk ^ (row % 8)) * 16; }

}  // namespace mla::cuda::general::tensor_core
