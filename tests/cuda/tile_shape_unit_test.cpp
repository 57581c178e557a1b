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
  EXPECT_EQ(shape.tile_rows % 16, 0);
  EXPECT_LE(shape.tile_rows, kMaxTileRows);
  EXPECT_TRUE(shape.block_keys == 64 || shape.block_keys == 32);
  EXPECT_GE(shape.num_stages, 2);
  EXPECT_LE(shape.num_stages, 4);
  EXPECT_GE(shape.rope_column, geometry.kv_lora_rank);
  EXPECT_GE(shape.width, shape.rope_column + geometry.qk_rope_head_dim);
  EXPECT_EQ(shape.width % kGroupColumns, 0);
  EXPECT_EQ(shape.row_bytes, 2 * shape.width);
  EXPECT_EQ(shape.has_padding,
            shape.width > geometry.latent_width());  // some column that no load writes
  const size_t with_reserve = (shape.smem_bytes + 1024) * static_cast<size_t>(shape.blocks_per_sm);
  EXPECT_LE(shape.smem_bytes, static_cast<size_t>(smem));
  EXPECT_LE(with_reserve, static_cast<size_t>(smem) + 1024);
}

TEST(TileShapeUnit, EveryShapeFitsTheBlockItIsFor) {
  for (const int32_t smem : {kHopperSmem, kAmpereSmem, kSmallSmem}) {
    for (const int32_t rank : {1, 15, 16, 64, 100, 128, 129, 192, 256, 257, 500, 512}) {
      for (const int32_t rope : {0, 1, 16, 32, 64}) {
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
  EXPECT_EQ(hopper.block_keys, 64);
  const TileShape ampere = choose_tile_shape(latent(512, 64), kAmpereSmem);
  EXPECT_EQ(ampere.tile_rows, 64);
  EXPECT_EQ(ampere.block_keys, 32);
  EXPECT_GE(choose_tile_shape(latent(512, 64), kSmallSmem).tile_rows, 16);
}

TEST(TileShapeUnit, RowsThatFitNowhereHaveNoShape) {
  EXPECT_EQ(choose_tile_shape(latent(512, 4096), kHopperSmem).tile_rows, 0);
}

TEST(TileShapeUnit, ShortRowsLeaveRoomForTwoBlocks) {
  EXPECT_EQ(choose_tile_shape(latent(128, 32), kHopperSmem).blocks_per_sm, 2);
  EXPECT_EQ(choose_tile_shape(latent(256, 64), kHopperSmem).blocks_per_sm, 1);
}

}  // namespace
}  // namespace mla::cuda::general
