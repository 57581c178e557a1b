#include "cuda/general/tile_shape.hpp"

#include <algorithm>

namespace mla::cuda::general {
namespace {

constexpr int32_t kElementBytes = 2;
constexpr int32_t kStatisticsBytes = 1536;  // maxima, sums and factors of rows

int32_t round_up(int32_t value, int32_t unit) { return (value + unit - 1) / unit * unit; }

// tile_rows is 0 where the ring is too short.
TileShape lay_out(const Geometry& geometry, int32_t tile_rows, int32_t value_columns,
                  int32_t smem_bytes) {
  TileShape shape{.tile_rows = tile_rows,
                  .value_columns = value_columns,
                  .rope_column = round_up(geometry.kv_lora_rank, 16)};
  const int32_t used = shape.rope_column + geometry.qk_rope_head_dim;
  shape.width = round_up(used, kGroupColumns);
  shape.has_padding = shape.rope_column != geometry.kv_lora_rank || shape.width != used;
  shape.row_bytes = shape.width * kElementBytes;
  shape.keys_at = tile_rows * shape.row_bytes;
  const int32_t weights_bytes =  // of two blocks
      2 * kElementBytes * tile_rows * block_keys(value_columns, tile_rows);
  const int32_t room = smem_bytes - shape.keys_at - weights_bytes - kStatisticsBytes;
  int32_t ring_bytes = 0;
  for (int32_t i = 0, rows = 16; rows <= tile_rows; ++i, rows *= 2) {
    const int32_t stage_bytes = block_keys(value_columns, rows) * shape.row_bytes;
    shape.num_stages[i] = std::min(room / stage_bytes, kMaxStages);
    if (shape.num_stages[i] < least_stages(rows)) return {};
    ring_bytes = std::max(ring_bytes, shape.num_stages[i] * stage_bytes);
  }
  shape.weights_at = shape.keys_at + ring_bytes;
  shape.statistics_at = shape.weights_at + weights_bytes;
  shape.smem_bytes = static_cast<size_t>(shape.statistics_at) + kStatisticsBytes;
  return shape;
}

}  // namespace

TileShape choose_tile_shape(const Geometry& geometry, int32_t smem_bytes) {
  for (const int32_t tile_rows : {64, 32, 16}) {
    for (const int32_t value_columns : {128, 256, kMaxRank}) {
      if (value_columns < geometry.kv_lora_rank) continue;
      const TileShape shape = lay_out(geometry, tile_rows, value_columns, smem_bytes);
      if (shape.tile_rows > 0) return shape;
    }
  }
  return {};
}

}  // namespace mla::cuda::general
