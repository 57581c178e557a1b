#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/geometry.hpp"

namespace mla::cuda::general {

inline constexpr int32_t kGroupColumns = 64;
inline constexpr int32_t kMaxTileRows = 64;
inline constexpr int32_t kMaxRank = 512;
inline constexpr int32_t kMaxStages = 8;
inline constexpr int32_t kWeightsOfBlock = 2048;  // rows of a tile x keys of a block, at most

/// Keys of one inner step of tiles of up to so many rows: 2048 scores, or fewer where rows are
/// wide, so that several blocks fit in shared memory.
constexpr int32_t block_keys(int32_t value_columns, int32_t tile_rows) {
  const int32_t most = 16384 / value_columns;
  return most * tile_rows < kWeightsOfBlock ? most : kWeightsOfBlock / tile_rows;
}

/// What the ring of blocks of keys must hold. Tiles of 64 rows load into it a step later.
constexpr int32_t least_stages(int32_t tile_rows) { return tile_rows == kMaxTileRows ? 3 : 2; }

/// How the tensor-core kernel lays out its shared memory. Rows of queries and keys are
/// [ckv, padded to 16 columns | kpe], padded to whole groups of 64 columns; the padding is zero.
/// Rows of weights are 128 bytes or more. In every 128 bytes the 16-byte chunk c of row r lies at
/// c ^ (r % 8), so that eight rows of a column are in eight bank groups.
struct TileShape {
  int32_t tile_rows = 0;      ///< rows (query x head) of a tile, 16, 32 or 64
  int32_t value_columns = 0;  ///< that the kernel is compiled for, 128, 256 or 512
  int32_t rope_column = 0;    ///< where kpe starts in a row
  int32_t width = 0;          ///< columns of a row
  int32_t row_bytes = 0;
  int32_t keys_at = 0, weights_at = 0, statistics_at = 0;  ///< bytes, after the queries
  size_t smem_bytes = 0;

  /// Blocks of keys that the ring holds, for tiles of 16, 32 and 64 rows.
  int32_t num_stages[3] = {};

  /// Columns [rank, rope_column) and those past kpe exist.
  bool has_padding = false;
};

/// The largest that fits; tile_rows is 0 where none does. smem_bytes: what a block may have.
TileShape choose_tile_shape(const Geometry& geometry, int32_t smem_bytes);

}  // namespace mla::cuda::general
