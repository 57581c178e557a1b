#include <gtest/gtest.h>

#include "cuda/cost_table.hpp"

namespace mla::cuda {
namespace {

Geometry geometry_of(int32_t rank, int32_t rope) {
  return {.num_heads = 16, .kv_lora_rank = rank, .qk_rope_head_dim = rope};
}

TEST(CostTableUnit, AMeasuredCardHasCostsForEachTileOfItsHopperKernel) {
  for (const int32_t tile_rows : {64, 128}) {
    const KernelCosts* costs =
        find_costs("NVIDIA H200", "sm90_dense", geometry_of(512, 64), tile_rows);
    ASSERT_NE(costs, nullptr) << tile_rows;
    EXPECT_GE(costs->tile_ns, 0);
    EXPECT_GT(costs->block_ns + costs->block_row_ns, 0);
    EXPECT_GE(costs->partial_row_ns, 0);
    EXPECT_GE(costs->merge_ns, 0);
  }
}

TEST(CostTableUnit, WhatWasNotMeasuredIsNotFound) {
  EXPECT_EQ(find_costs("NVIDIA H300", "sm90_dense", geometry_of(512, 64), 64), nullptr);
  EXPECT_EQ(find_costs("NVIDIA H200", "sm90", geometry_of(512, 64), 64), nullptr);
  EXPECT_EQ(find_costs("NVIDIA H200", "sm90_dense", geometry_of(500, 64), 64), nullptr);
  EXPECT_EQ(find_costs("NVIDIA H200", "sm90_dense", geometry_of(512, 60), 64), nullptr);
  EXPECT_EQ(find_costs("NVIDIA H200", "sm90_dense", geometry_of(512, 64), 65), nullptr);
}

}  // namespace
}  // namespace mla::cuda
