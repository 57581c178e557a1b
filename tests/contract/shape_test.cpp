#include <cstring>

#include "cases/random.hpp"
#include "contract/contract.hpp"

namespace mla::contract {
namespace {

MLA_CONTRACT_SUITE(HeadCountContract);
MLA_CONTRACT_SUITE(LatentShapeContract);

// Dao-AILab/flash-attention PR 2883, sgl-project/sglang PR 22372, vllm-project/vllm PR 48047,
// ROCm/aiter issue 4541, HazyResearch/ThunderKittens PR 99: only some head counts were served.
TEST_P(HeadCountContract, AnyNumberOfHeadsIsServed) {
  for (const int32_t heads : {1, 2, 3, 7, 8, 12, 16, 20, 32, 33, 65, 96, 127, 128}) {
    AttentionCase c{.q_lens = {1, 4}, .kv_lens = {65, 33}, .causal = true};
    c.geometry.num_heads = heads;
    expect_holds(c, 48);
  }
}

// More heads than a tile has rows, over many steps: of a page, of several whole ones, and of parts.
TEST_P(HeadCountContract, ManyHeadsAreServedOverManySteps) {
  for (const int32_t heads : {65, 96, 128}) {
    for (const int32_t page_size : {8, 16, 24, 32, 64, 128}) {
      AttentionCase c{.q_lens = {3, 1, 2}, .kv_lens = {700, 64, 129}, .causal = true};
      c.geometry.num_heads = heads;
      c.geometry.page_size = page_size;
      expect_holds(c, 48);
      c.splits = {.forced_count = 3};
      expect_holds(c, 48);
    }
  }
}

TEST_P(HeadCountContract, ManyHeadsOfEitherTypeAreServedWithAndWithoutRope) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int32_t rope : {64, 0}) {
      AttentionCase c{
          .q_lens = {3, 1}, .kv_lens = {700, 129}, .causal = true, .splits = {.forced_count = 3}};
      c.geometry.num_heads = 65;
      c.geometry.qk_rope_head_dim = rope;
      c.geometry.dtype = c.geometry.kv_dtype = dtype;
      expect_holds(c, 48);
    }
  }
}

// Partial rows of tiles that one warp stores, several, and two blocks.
TEST_P(HeadCountContract, SplitRowsOfAnyNumberOfHeadsAreMerged) {
  for (const int32_t heads : {1, 16, 20, 33, 64, 65, 128}) {
    AttentionCase c{
        .q_lens = {1, 2}, .kv_lens = {200, 129}, .causal = true, .splits = {.forced_count = 3}};
    c.geometry.num_heads = heads;
    c.geometry.page_size = 64;
    EXPECT_GT(expect_holds(c, 48).plan.num_splits, 1);
  }
}

TEST_P(HeadCountContract, TheLargestNumberOfHeadsIsServed) {
  AttentionCase c{.q_lens = {1, 2}, .kv_lens = {9, 3}, .causal = true};
  c.geometry.num_heads = 1024;
  c.geometry.kv_lora_rank = 16;
  c.geometry.qk_rope_head_dim = 8;
  expect_holds(c, 128);
}

// ikawrakow/ik_llama.cpp PR 386: one head count repeated a letter, another did not.
TEST_P(HeadCountContract, EqualHeadsGiveEqualBits) {
  for (const int32_t heads : {16, 32, 128}) {
    AttentionCase c{.q_lens = {2}, .kv_lens = {100}, .causal = true, .equal_heads = true};
    c.geometry.num_heads = heads;
    const CheckReport report = expect_holds(c, 16);
    const size_t rank = c.geometry.kv_lora_rank;
    for (size_t row = 1; row < static_cast<size_t>(heads); ++row) {
      ASSERT_EQ(
          std::memcmp(report.out.data(), report.out.data() + row * rank, rank * sizeof(float)), 0)
          << heads << " heads, head " << row;
    }
  }
}

// flashinfer-ai/flashinfer issue 1330: 256 + 64. PR 4373: rope width 0 left the accumulator as it
// was. vllm-project/vllm PR 52189: a tiny model's shape failed deep inside.
TEST_P(LatentShapeContract, ShapesOfModelsAreServed) {
  for (const auto& [rank, rope] : {std::pair{512, 64}, {512, 0}, {256, 64}, {128, 32}, {64, 16}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      AttentionCase c{.q_lens = {1, 2}, .kv_lens = {33, 130}, .causal = true};
      c.geometry = {.num_heads = 4,
                    .kv_lora_rank = rank,
                    .qk_rope_head_dim = rope,
                    .page_size = 16,
                    .dtype = dtype,
                    .kv_dtype = dtype};
      expect_holds(c);
      c.layout.separate_cache = true;
      expect_holds(c);
    }
  }
}

// Rows of few chunks of 16 bytes, in tiles of every height, against so many keys that a ring of
// blocks comes round.
TEST_P(LatentShapeContract, NarrowRowsAreServedOverManySteps) {
  for (const auto& [rank, rope] : {std::pair{64, 16}, {64, 64}, {128, 0}, {8, 8}}) {
    for (const int32_t heads : {16, 32, 64}) {
      AttentionCase c{.q_lens = {1},
                      .kv_lens = {heads == 16 ? 1300 : 700},
                      .causal = true,
                      .splits = {.forced_count = 1}};
      c.geometry = {.num_heads = heads,
                    .kv_lora_rank = rank,
                    .qk_rope_head_dim = rope,
                    .page_size = 16,
                    .dtype = DType::kBFloat16,
                    .kv_dtype = DType::kBFloat16};
      expect_holds(c);
    }
  }
}

// Columns that fill no vector, no pair of vectors, and no rope at all.
TEST_P(LatentShapeContract, AnyShapeIsServed) {
  for (uint32_t i = 0; i < 40; ++i) {
    const uint64_t key = cases::row_key(86, i, 0);
    const auto below = [&](uint32_t column, uint32_t end) {
      return static_cast<int32_t>(cases::random_bits(key, column) % end);
    };
    const DType dtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
    AttentionCase c{.name = "random shape",
                    .q_lens = {1, 3},
                    .kv_lens = {1 + below(0, 90), 20},
                    .causal = true};
    c.geometry = {.num_heads = 1 + below(1, 6),
                  .kv_lora_rank = 1 + below(2, i % 2 == 0 ? 20 : 300),
                  .qk_rope_head_dim = below(3, 4) == 0 ? 0 : below(4, 80),
                  .page_size = 1 + below(5, 40),
                  .dtype = dtypes[i % 3],
                  .kv_dtype = dtypes[i % 3]};
    c.layout.separate_cache = below(6, 2) == 0;
    c.layout.misaligned = below(7, 2) == 0;
    c.layout.row_pad = below(8, 4);
    c.layout.q_pad = below(9, 4);
    expect_holds(c);
  }
}

// Partial rows of widths that are no multiple of what is read at once, merged in few parts and
// many.
TEST_P(LatentShapeContract, SplitRowsOfAnyWidthAreMerged) {
  for (const int32_t rank : {1, 2, 3, 6, 127, 129, 258, 500}) {
    for (const int32_t parts : {2, 9, 40}) {
      AttentionCase c{.name = "split rows",
                      .q_lens = {1, 2},
                      .kv_lens = {40 * 64, 1000},
                      .causal = true,
                      .splits = {.forced_count = parts}};
      c.geometry = {.num_heads = 3,
                    .kv_lora_rank = rank,
                    .qk_rope_head_dim = 5,
                    .page_size = 16,
                    .dtype = DType::kBFloat16,
                    .kv_dtype = DType::kBFloat16};
      EXPECT_GT(expect_holds(c).plan.num_splits, 1);
    }
  }
}

TEST_P(LatentShapeContract, TheWidestLatentIsServed) {
  for (const int32_t rope : {0, 1, 64}) {
    AttentionCase c{.q_lens = {2}, .kv_lens = {20}, .causal = true};
    c.geometry.kv_lora_rank = 8192 - rope;
    c.geometry.qk_rope_head_dim = rope;
    c.geometry.num_heads = 2;
    c.geometry.dtype = c.geometry.kv_dtype = DType::kFloat32;
    expect_holds(c);
  }
  AttentionCase c{.q_lens = {2}, .kv_lens = {20}, .causal = true};
  c.geometry.kv_lora_rank = 1;
  c.geometry.qk_rope_head_dim = 8191;
  c.geometry.num_heads = 2;
  expect_holds(c);
}

}  // namespace
}  // namespace mla::contract
