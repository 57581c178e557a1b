#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/geometry.hpp"

namespace mla::cuda::general {

/// How the tensor-core kernel lays out its shared memory. Rows of queries and keys are
/// [ckv, padded to 16 columns | kpe], padded to whole groups of 64 columns; the padding is zero.
/// Rows of weights are one group. In every group the 16-byte chunk c of row r lies at c ^ (r % 8),
/// so that eight rows of a column are in eight bank groups.
struct TileShape {
  int32_t tile_rows = 0;   ///< rows (query x head) of a tile, a multiple of 16
  int32_t block_keys = 0;  ///< keys of one inner step, 32 or 64
  int32_t num_stages = 0;  ///< blocks of keys in shared memory
  int32_t blocks_per_sm = 0;
  int32_t rope_column = 0;  ///< where kpe starts in a row
  int32_t width = 0;        ///< columns of a row
  int32_t row_bytes = 0;
  size_t smem_bytes = 0;

  /// Columns [rank, rope_column) and those past kpe exist.
  bool has_padding = false;
};

inline constexpr int32_t kGroupColumns = 64;
inline constexpr int32_t kWeightRowBytes = 128;
inline constexpr int32_t kMaxTileRows = 64;
inline constexpr int32_t kMaxRank = 512;
inline constexpr int32_t kMaxRankOfTwoBlocks = 128;  // two blocks on a multiprocessor

/// The largest that fits; tile_rows is 0 where none does. smem_bytes: what a block may have.
TileShape choose_tile_shape(const Geometry& geometry, int32_t smem_bytes);

}  // namespace mla::cuda::general
