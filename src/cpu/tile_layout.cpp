#include "cpu/tile_layout.hpp"

#include <cassert>

namespace mla::cpu {
namespace {

struct TileShape {
  int32_t rows;
  int32_t tokens;
};

// The first whose buffers fit serves: 128 rows up to a latent width of about 1,000, 8 rows at
// 8,192. Whole groups of keys of every register tile (24, 12, 8, 6 and 4).
constexpr TileShape kTileShapes[] = {{128, 96}, {64, 96}, {32, 96}, {32, 48}, {16, 48}, {8, 24}};

constexpr int32_t round_up(int32_t value, int32_t unit) { return (value + unit - 1) / unit * unit; }

// Whole vectors of which no two rows begin in the same cache set: an odd number of 64-byte lines.
// With 512 columns as they are, the rows of a block would share 2 of the 64 sets of a level-1
// cache.
int32_t spread_stride(int32_t columns) {
  constexpr int32_t kLine = 16;  // floats
  const int32_t lines = round_up(columns, kLine) / kLine;
  return (lines | 1) * kLine;
}

TileLayout lay_out(const Geometry& geometry, int32_t lanes, TileShape shape) {
  TileLayout layout;
  layout.tile_rows = shape.rows;
  layout.block_tokens = shape.tokens;
  layout.rank_padded = round_up(geometry.kv_lora_rank, lanes);
  layout.width_padded = layout.rank_padded + round_up(geometry.qk_rope_head_dim, lanes);
  layout.key_stride = spread_stride(layout.width_padded);
  layout.out_stride = spread_stride(layout.rank_padded);
  const int32_t rows = shape.rows > lanes / 2 ? round_up(shape.rows, lanes) : shape.rows;
  const int32_t row_lanes = round_up(shape.rows, lanes);
  const auto book = [&](int64_t units, size_t unit_bytes) {
    constexpr size_t kAlign = 64;
    const size_t at = layout.bytes;
    layout.bytes += (static_cast<size_t>(units) * unit_bytes + kAlign - 1) / kAlign * kAlign;
    return at;
  };
  layout.queries_at = book(int64_t{rows} * layout.width_padded, sizeof(float));
  layout.keys_at = book(int64_t{shape.tokens} * layout.key_stride, sizeof(float));
  layout.scores_at = book(int64_t{shape.tokens} * row_lanes, sizeof(float));
  layout.out_at = book(int64_t{shape.rows} * layout.out_stride, sizeof(float));
  layout.total_at = book(int64_t{shape.rows} * layout.out_stride, sizeof(float));
  layout.rows_at = book(int64_t{row_lanes} * kRowVectors, sizeof(float));
  layout.sources_at = book(int64_t{shape.tokens} * 4, sizeof(const void*));
  return layout;
}

}  // namespace

TileLayout tile_layout(const Geometry& geometry, int32_t lanes) {
  TileLayout layout;
  for (const TileShape shape : kTileShapes) {
    layout = lay_out(geometry, lanes, shape);
    if (layout.bytes <= kMaxWorkerBytes) break;
  }
  assert(layout.bytes <= kMaxWorkerBytes);
  return layout;
}

}  // namespace mla::cpu
