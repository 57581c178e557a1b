#include <gtest/gtest.h>

#include "cuda/general/tile_shape.hpp"

namespace mla::cuda::general {
namespace {

constexpr int32_t kHopperSmem = 232448;  // bytes of a block, with the opt-in
constexpr int32_t kAmpereSmem = 166912;
constexpr int32_t kSmallSmem = 101376;  // compute capability 8.6 and 8.9

Geometry latent(int32_t rank, int32_t rope) {
  return {.num_heads = 16, .kv_lora_rank = rank, .qk_rope_head_dim = rope, .page_size = 64};
}

// What the kernel takes for granted of every shape.
void expect_well_formed(const TileShape& shape, const Geometry& geometry, int32_t smem) {
  EXPECT_TRUE(shape.tile_rows == 16 || shape.tile_rows == 32 || shape.tile_rows == kMaxTileRows);
  EXPECT_GE(shape.value_columns, geometry.kv_lora_rank);
  EXPECT_GE(shape.rope_column, geometry.kv_lora_rank);
  EXPECT_GE(shape.width, shape.rope_column + geometry.qk_rope_head_dim);
  EXPECT_EQ(shape.width % kGroupColumns, 0);
  EXPECT_EQ(shape.row_bytes, 2 * shape.width);
  EXPECT_EQ(shape.has_padding,
            shape.width > geometry.latent_width());  // some column that no load writes
  EXPECT_GE(shape.keys_at, shape.tile_rows * shape.row_bytes);
  for (int32_t i = 0, rows = 16; rows <= shape.tile_rows; ++i, rows *= 2) {
    EXPECT_GE(shape.num_stages[i], least_stages(rows));
    EXPECT_LE(shape.num_stages[i], kMaxStages);
    const int32_t keys = block_keys(shape.value_columns, rows);
    EXPECT_LE(keys * rows, kWeightsOfBlock);
    EXPECT_GE(shape.statistics_at, shape.weights_at + 4 * keys * rows);  // of two blocks
    EXPECT_LE(shape.keys_at + shape.num_stages[i] * keys * shape.row_bytes, shape.weights_at);
  }
  EXPECT_LE(shape.smem_bytes, static_cast<size_t>(smem));
}

TEST(TileShapeUnit, EveryShapeFitsTheBlockItIsFor) {
  for (const int32_t smem : {kHopperSmem, kAmpereSmem, kSmallSmem}) {
    for (const int32_t rank : {1, 15, 16, 64, 100, 128, 129, 192, 256, 257, 500, 512}) {
      for (const int32_t rope : {0, 1, 16, 32, 64, 400}) {
        const TileShape shape = choose_tile_shape(latent(rank, rope), smem);
        if (shape.tile_rows == 0) continue;
        SCOPED_TRACE(std::to_string(rank) + "+" + std::to_string(rope));
        expect_well_formed(shape, latent(rank, rope), smem);
      }
    }
  }
}

TEST(TileShapeUnit, DeepSeekRowsFitEveryCard) {
  const TileShape hopper = choose_tile_shape(latent(512, 64), kHopperSmem);
  EXPECT_EQ(hopper.tile_rows, 64);
  EXPECT_EQ(hopper.num_stages[2], 4);
  const TileShape ampere = choose_tile_shape(latent(512, 64), kAmpereSmem);
  EXPECT_EQ(ampere.tile_rows, 32);
  EXPECT_EQ(ampere.num_stages[1], 3);
  EXPECT_EQ(choose_tile_shape(latent(512, 64), kSmallSmem).tile_rows, 16);
}

TEST(TileShapeUnit, RowsThatFitNowhereHaveNoShape) {
  EXPECT_EQ(choose_tile_shape(latent(512, 4096), kHopperSmem).tile_rows, 0);
}

TEST(TileShapeUnit, ShortRowsAreTakenInLongerBlocks) {
  const TileShape narrow = choose_tile_shape(latent(64, 16), kHopperSmem);
  EXPECT_EQ(block_keys(narrow.value_columns, 16), 128);
  EXPECT_EQ(block_keys(narrow.value_columns, 64), 32);
  EXPECT_EQ(block_keys(choose_tile_shape(latent(192, 64), kHopperSmem).value_columns, 16), 64);
  // A long rope part leaves no room for them.
  EXPECT_EQ(choose_tile_shape(latent(128, 512), kHopperSmem).value_columns, 512);
}

}  // namespace
}  // namespace mla::cuda::general
