#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/geometry.hpp"

namespace mla::cpu {

/// Working memory of one worker, whatever the geometry.
inline constexpr size_t kMaxWorkerBytes = size_t{2} << 20;

/// Latent columns are cut into chunks of this many, ckv and kpe each for itself; a buffer of keys
/// or queries holds one chunk of all its rows after the other. A chunk of a block of keys (24 KiB)
/// and of a panel of queries stays in the level-1 cache while they are multiplied, and rows lie a
/// constant stride apart, so that the inner loops compute no addresses.
inline constexpr int32_t kChunkColumns = 64;

/// Parts that the sum over the columns of a score is kept in.
inline constexpr int32_t kScoreParts = 3;

/// The shapes of the SIMD kernel for one geometry and vector width, and where each buffer lies in
/// the worker's memory. The only place that knows them: cost model, memory query and kernel ask it.
struct TileLayout {
  int32_t tile_rows = 0;     ///< rows of a tile at most
  int32_t block_tokens = 0;  ///< keys that are widened to fp32 together
  int32_t rank_chunks = 0;   ///< chunks of kv_lora_rank; chunk rank_chunks is the first of kpe
  int32_t num_chunks = 0;
  int32_t out_stride = 0;  ///< floats from one row of accumulators to the next
  // Byte offsets of the buffers.
  size_t queries_at = 0;  ///< fp32 queries, [panel][chunk][column][row] or [row][chunk][column]
  size_t keys_at = 0;     ///< [chunk][key][column], one block widened
  size_t scores_at = 0;   ///< [part][panel][key][row]; part 0 becomes the weights
  size_t out_at = 0;      ///< [tile_rows][out_stride], sums of weight x value since the last fold
  size_t total_at = 0;    ///< the same, of all folds
  size_t rows_at = 0;     ///< kRowVectors fp32 or int32 numbers a row
  size_t sources_at = 0;  ///< pointers to the rows of this block and of the next one
  size_t bytes = 0;
};

/// Numbers kept for each row: running maximum, sum, rescaling factor, maximum and sum at the last
/// fold, end of its visible keys.
inline constexpr int32_t kRowVectors = 6;

/// `lanes`: fp32 lanes of a vector. At most kMaxWorkerBytes for every geometry that the library
/// accepts: blocks and tiles shrink for wide latents.
TileLayout tile_layout(const Geometry& geometry, int32_t lanes);

}  // namespace mla::cpu
