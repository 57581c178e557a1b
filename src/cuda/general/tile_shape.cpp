#include "cuda/general/tile_shape.hpp"

namespace mla::cuda::general {
namespace {

constexpr int32_t kElementBytes = 2;
constexpr int32_t kStatisticsBytes = 2048;  // where rows come from; maxima, sums and factors
constexpr int32_t kReservedBytes = 1024;    // of each block, by the system

int32_t round_up(int32_t value, int32_t unit) { return (value + unit - 1) / unit * unit; }

struct Candidate {
  int32_t blocks_per_sm, tile_rows, block_keys, num_stages;
};

// In order of preference: two blocks hide each other's barriers, more stages hide latency.
constexpr Candidate kCandidates[] = {
    {2, 64, 64, 4}, {2, 64, 64, 3}, {2, 64, 64, 2}, {1, 64, 64, 4}, {1, 64, 64, 3}, {1, 64, 64, 2},
    {1, 64, 32, 2}, {1, 32, 64, 2}, {1, 32, 32, 2}, {1, 16, 64, 2}, {1, 16, 32, 2},
};

TileShape lay_out(const Geometry& geometry, const Candidate& candidate) {
  TileShape shape{.tile_rows = candidate.tile_rows,
                  .block_keys = candidate.block_keys,
                  .num_stages = candidate.num_stages,
                  .blocks_per_sm = candidate.blocks_per_sm,
                  .rope_column = round_up(geometry.kv_lora_rank, 16)};
  const int32_t used = shape.rope_column + geometry.qk_rope_head_dim;
  shape.width = round_up(used, kGroupColumns);
  shape.has_padding = shape.rope_column != geometry.kv_lora_rank || shape.width != used;
  shape.row_bytes = shape.width * kElementBytes;
  const int32_t rows = shape.tile_rows + shape.num_stages * shape.block_keys;
  shape.smem_bytes = static_cast<size_t>(rows) * static_cast<size_t>(shape.row_bytes) +
                     static_cast<size_t>(shape.tile_rows) * kWeightRowBytes + kStatisticsBytes;
  return shape;
}

}  // namespace

TileShape choose_tile_shape(const Geometry& geometry, int32_t smem_bytes) {
  for (const Candidate& candidate : kCandidates) {
    // Shorter blocks are there for the widest rows only.
    if (candidate.block_keys < kGroupColumns && geometry.kv_lora_rank <= 256) continue;
    // With more columns of output a block needs all registers.
    if (candidate.blocks_per_sm > 1 && geometry.kv_lora_rank > kMaxRankOfTwoBlocks) continue;
    const TileShape shape = lay_out(geometry, candidate);
    const size_t limit =
        candidate.blocks_per_sm == 1
            ? static_cast<size_t>(smem_bytes)
            : static_cast<size_t>((smem_bytes + kReservedBytes) / candidate.blocks_per_sm -
                                  kReservedBytes);
    if (shape.smem_bytes <= limit) return shape;
  }
  return {};
}

}  // namespace mla::cuda::general
