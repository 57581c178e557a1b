#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/simd_impls.hpp"
#include "cpu/tile_layout.hpp"
#include "cpu/tile_problem.hpp"

// One tile of the SIMD kernel against the double reference, for every instruction set that this
// machine has. Batches, splits and merging are the contract suite's matter.
namespace mla::cpu {
namespace {

Geometry geometry_of(int32_t heads, int32_t rank, int32_t rope, int32_t page_size,
                     DType dtype = DType::kFloat32) {
  return {.num_heads = heads,
          .kv_lora_rank = rank,
          .qk_rope_head_dim = rope,
          .page_size = page_size,
          .dtype = dtype,
          .kv_dtype = dtype};
}

std::string name_of_case(const TileCase& c) {
  const Geometry& g = c.geometry;
  return std::string(name_of(g.dtype)) + " H" + std::to_string(g.num_heads) + " D" +
         std::to_string(g.kv_lora_rank) + "+" + std::to_string(g.qk_rope_head_dim) + " P" +
         std::to_string(g.page_size) + " q" + std::to_string(c.num_queries) + " kv" +
         std::to_string(c.num_keys);
}

class CpuAttentionUnit : public testing::TestWithParam<const AttentionImpl*> {
 protected:
  const AttentionImpl& impl() const { return *GetParam(); }

  void expect_matches(const TileCase& tile_case) const {
    TileProblem problem(tile_case, impl());
    problem.run();
    EXPECT_EQ(problem.check(), "") << name_of_case(tile_case);
  }
};

TEST_P(CpuAttentionUnit, EveryDtypeMatchesReference) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    expect_matches({.geometry = geometry_of(16, 512, 64, 64, dtype), .num_keys = 200});
    expect_matches({.geometry = geometry_of(5, 37, 9, 3, dtype), .num_queries = 3, .num_keys = 50});
  }
}

TEST_P(CpuAttentionUnit, AnyHeadCountMatchesReference) {
  for (const int32_t heads :
       {1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 31, 32, 33, 48, 65, 128}) {
    expect_matches({.geometry = geometry_of(heads, 64, 16, 16), .num_keys = 130});
  }
}

TEST_P(CpuAttentionUnit, AnyLatentShapeMatchesReference) {
  for (const auto& [rank, rope] : {std::pair{1, 0},
                                   {1, 1},
                                   {3, 5},
                                   {15, 16},
                                   {17, 0},
                                   {64, 16},
                                   {100, 28},
                                   {128, 32},
                                   {256, 64},
                                   {512, 0},
                                   {65, 63}}) {
    for (const int32_t heads : {1, 6, 16, 40}) {
      expect_matches({.geometry = geometry_of(heads, rank, rope, 5), .num_keys = 101});
    }
  }
}

TEST_P(CpuAttentionUnit, WidestLatentsMatchReference) {
  for (const auto& [rank, rope] :
       {std::pair{8192, 0}, {8128, 64}, {1, 8191}, {2000, 100}, {4000, 9}, {1100, 64}}) {
    expect_matches({.geometry = geometry_of(24, rank, rope, 7), .num_queries = 2, .num_keys = 60});
  }
}

TEST_P(CpuAttentionUnit, AnyPageSizeMatchesReference) {
  for (const int32_t page_size : {1, 2, 7, 16, 33, 64, 96, 100, 1000}) {
    expect_matches({.geometry = geometry_of(16, 48, 16, page_size), .num_keys = 301});
  }
}

TEST_P(CpuAttentionUnit, AnyKeyCountMatchesReference) {
  for (const int32_t keys :
       {1, 2, 3, 5, 8, 9, 15, 16, 17, 23, 24, 25, 47, 48, 95, 96, 97, 193, 500}) {
    for (const int32_t heads : {2, 16, 32}) {
      expect_matches({.geometry = geometry_of(heads, 32, 8, 16), .num_keys = keys});
    }
  }
}

TEST_P(CpuAttentionUnit, ManyBlocksFoldIntoOneTotal) {
  for (const int32_t heads : {2, 16}) {
    expect_matches({.geometry = geometry_of(heads, 20, 4, 64), .num_keys = 32 * 96 * 2 + 100});
  }
}

TEST_P(CpuAttentionUnit, CausalTilesMatchReference) {
  for (const int32_t heads : {1, 3, 8, 16, 24}) {
    for (const int32_t keys : {9, 100, 230}) {
      expect_matches(
          {.geometry = geometry_of(heads, 40, 8, 16), .num_queries = 9, .num_keys = keys});
    }
  }
}

TEST_P(CpuAttentionUnit, NonCausalRowsSeeAllKeys) {
  expect_matches(
      {.geometry = geometry_of(4, 40, 8, 16), .num_queries = 9, .num_keys = 5, .causal = false});
}

TEST_P(CpuAttentionUnit, TilesBeginAtAnyRowAndKey) {
  for (const int64_t row_begin : {1, 5, 17}) {
    for (const int32_t kv_begin : {0, 1, 63, 99}) {
      for (const bool partial : {false, true}) {
        expect_matches({.geometry = geometry_of(6, 33, 7, 10, DType::kBFloat16),
                        .num_queries = 8,
                        .num_keys = 150,
                        .row_begin = row_begin,
                        .num_rows = 20,
                        .kv_begin = kv_begin,
                        .kv_end = 149,
                        .partial = partial});
      }
    }
  }
}

TEST_P(CpuAttentionUnit, RowsWithoutKeysAreEmpty) {
  // Four queries, two keys: the first two queries see none.
  TileProblem few({.geometry = geometry_of(3, 20, 4, 8), .num_queries = 4, .num_keys = 2}, impl());
  few.run();
  ASSERT_EQ(few.check(), "");
  EXPECT_EQ(few.lse_value(5), -INFINITY);
  EXPECT_EQ(few.out_value(5, 19), 0.0F);
  EXPECT_GT(few.lse_value(6), -INFINITY);
  for (const bool partial : {false, true}) {
    // An empty range of keys, no keys at all, and a range past what the rows see.
    expect_matches({.geometry = geometry_of(16, 20, 4, 8),
                    .num_keys = 50,
                    .kv_begin = 7,
                    .kv_end = 7,
                    .partial = partial});
    expect_matches({.geometry = geometry_of(16, 20, 4, 8), .num_keys = 0, .partial = partial});
    expect_matches({.geometry = geometry_of(2, 20, 4, 8),
                    .num_queries = 30,
                    .num_keys = 30,
                    .num_rows = 20,
                    .kv_begin = 15,
                    .partial = partial});
  }
}

TEST_P(CpuAttentionUnit, MaskedKeysOfTheRequestMayHoldNan) {
  // Whole groups of rows belong to one query, so what causal hides from it is never multiplied.
  const TileCase tile_case{
      .geometry = geometry_of(8, 64, 16, 16), .num_queries = 4, .num_keys = 40};
  TileProblem problem(tile_case, impl());
  std::memset(problem.key_row(39), 0xff, 80 * sizeof(float));
  problem.run();
  EXPECT_TRUE(std::isnan(problem.out_value(31, 0)));
  for (int32_t row = 0; row < 24; ++row) {
    EXPECT_FALSE(std::isnan(problem.out_value(row, 0))) << row;
    EXPECT_FALSE(std::isnan(problem.lse_value(row))) << row;
  }
}

TEST_P(CpuAttentionUnit, VisibleNanReachesTheRow) {
  for (const int32_t heads : {1, 16}) {
    TileProblem problem({.geometry = geometry_of(heads, 64, 16, 16), .num_keys = 100}, impl());
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(problem.key_row(50) + 70 * sizeof nan, &nan, sizeof nan);  // in kpe alone
    problem.run();
    EXPECT_TRUE(std::isnan(problem.out_value(0, 0)));
    EXPECT_TRUE(std::isnan(problem.lse_value(0)));
  }
}

TEST_P(CpuAttentionUnit, LseIsInThePlansBase) {
  TileProblem problem({.geometry = geometry_of(16, 64, 16, 16), .num_keys = 100}, impl());
  problem.params().lse_base = LseBase::kTwo;
  problem.run();
  EXPECT_EQ(problem.check(), "");
}

TEST_P(CpuAttentionUnit, LseMayBeUnwanted) {
  TileProblem problem({.geometry = geometry_of(16, 64, 16, 16), .num_keys = 100}, impl());
  problem.params().lse = nullptr;
  problem.run();
  EXPECT_TRUE(std::isnan(problem.lse_value(0)));
  EXPECT_FALSE(std::isnan(problem.out_value(0, 0)));
}

TEST_P(CpuAttentionUnit, ScatteredPagesGiveTheBitsOfContiguousOnes) {
  for (const int32_t heads : {2, 16}) {
    TileCase tile_case{.geometry = geometry_of(heads, 512, 64, 16), .num_keys = 90};
    TileProblem scattered(tile_case, impl());
    tile_case.contiguous = true;
    TileProblem contiguous(tile_case, impl());
    scattered.run();
    contiguous.run();
    EXPECT_EQ(scattered.result_bits(), contiguous.result_bits());
  }
}

TEST_P(CpuAttentionUnit, EqualHeadsGiveEqualBits) {
  for (const int32_t heads : {3, 7, 16, 33, 128}) {
    TileProblem problem(
        {.geometry = geometry_of(heads, 70, 10, 16), .num_keys = 333, .equal_heads = true}, impl());
    problem.run();
    const auto bits = problem.result_bits();
    const size_t row = bits.size() / static_cast<size_t>(problem.tile().num_rows);
    for (size_t at = row; at < bits.size(); at += row) {
      EXPECT_EQ(std::memcmp(bits.data(), bits.data() + at, row), 0) << heads << " heads";
    }
  }
}

TEST_P(CpuAttentionUnit, HugeScoresStayPrecise) {
  for (const int32_t heads : {2, 16, 32}) {
    TileProblem problem(
        {.geometry = geometry_of(heads, 512, 64, 64), .num_keys = 500, .query_scale = 1000.0F},
        impl());
    problem.run();
    EXPECT_EQ(problem.check(), "");
  }
}

TEST_P(CpuAttentionUnit, ManyEqualKeysSumExactly) {
  constexpr int32_t kKeys = 200000;
  for (const float value : {1.0F, 0.3F}) {
    TileProblem problem({.geometry = geometry_of(2, 4, 0, 1000), .num_keys = kKeys}, impl());
    for (int32_t token = 0; token < kKeys; ++token) {
      const std::array<float, 4> row = {value, value, 0, token == 77 ? 100.0F : value};
      std::memcpy(problem.key_row(token), row.data(), sizeof row);
    }
    problem.run();
    EXPECT_NEAR(problem.out_value(0, 0), value, 1e-5 * value);
    EXPECT_NEAR(problem.out_value(1, 1), value, 1e-5 * value);
  }
}

TEST_P(CpuAttentionUnit, OneLargeLogitDominates) {
  constexpr int32_t kKeys = 3001;
  TileProblem problem({.geometry = geometry_of(16, 32, 0, 64), .num_keys = kKeys, .sm_scale = 1.0F},
                      impl());
  auto* query = const_cast<float*>(static_cast<const float*>(problem.params().q_nope));
  for (int32_t i = 0; i < 2 * 16 + 16; ++i) {
    std::fill_n(query + i * 35, 32, 1.0F);
  }
  for (int32_t token = 0; token < kKeys; ++token) {
    std::array<float, 32> row{};
    row[0] = token == 7 ? 30.0F : 0.001F * static_cast<float>(token % 10);
    row[1] = token == 7 ? 0.25F : -0.001F;
    std::memcpy(problem.key_row(token), row.data(), sizeof row);
  }
  problem.run();
  EXPECT_EQ(problem.check(), "");
  EXPECT_NEAR(problem.out_value(0, 0), 30.0F, 30e-5);
}

TEST_P(CpuAttentionUnit, WorkingMemoryIsBounded) {
  for (int32_t rank = 1; rank <= kMaxLatentWidth; rank = rank * 5 / 4 + 1) {
    for (const int64_t rope : {int64_t{0}, int64_t{64}, kMaxLatentWidth - rank}) {
      if (rank + rope > kMaxLatentWidth) continue;
      const Geometry g = geometry_of(128, rank, static_cast<int32_t>(rope), 64);
      EXPECT_LE(impl().worker_bytes(g), kMaxWorkerBytes) << rank << "+" << rope;
      EXPECT_GE(impl().cost_model({g}).tile_rows, 8);
    }
  }
}

TEST_P(CpuAttentionUnit, RoundsOutputToNearestEven) {
  // One key: the output is the value itself, times a sum of exactly 1.
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    TileProblem problem({.geometry = geometry_of(1, 40, 0, 64, dtype), .num_keys = 2}, impl());
    problem.run();
    EXPECT_EQ(problem.check(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, CpuAttentionUnit, testing::ValuesIn(simd_impls()),
                         [](const auto& isa) { return std::string(isa.param->name); });

}  // namespace
}  // namespace mla::cpu
