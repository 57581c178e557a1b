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

constexpr int32_t divide_up(int32_t value, int32_t unit) { return (value + unit - 1) / unit; }

constexpr int32_t round_up(int32_t value, int32_t unit) { return divide_up(value, unit) * unit; }

TileLayout lay_out(const Geometry& geometry, int32_t lanes, TileShape shape) {
  TileLayout layout;
  layout.tile_rows = shape.rows;
  layout.block_tokens = shape.tokens;
  layout.rank_chunks = divide_up(geometry.kv_lora_rank, kChunkColumns);
  layout.num_chunks = layout.rank_chunks + divide_up(geometry.qk_rope_head_dim, kChunkColumns);
  // An odd number of cache lines: a stripe of columns of all rows would else share a few of the
  // sets of a level-1 cache.
  constexpr int32_t kLine = 16;  // floats
  layout.out_stride = layout.rank_chunks * kChunkColumns + kLine;
  const int64_t width = int64_t{layout.num_chunks} * kChunkColumns;
  const int32_t rows = shape.rows > lanes / 2 ? round_up(shape.rows, lanes) : shape.rows;
  const int32_t row_lanes = round_up(shape.rows, lanes);
  const auto book = [&](int64_t units, size_t unit_bytes) {
    constexpr size_t kAlign = 64;
    const size_t at = layout.bytes;
    layout.bytes += (static_cast<size_t>(units) * unit_bytes + kAlign - 1) / kAlign * kAlign;
    return at;
  };
  layout.queries_at = book(rows * width, sizeof(float));
  layout.keys_at = book(shape.tokens * width, sizeof(float));
  layout.scores_at = book(int64_t{shape.tokens} * row_lanes * kScoreParts, sizeof(float));
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
