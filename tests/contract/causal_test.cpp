#include <cmath>

#include "contract/contract.hpp"

namespace mla::contract {
namespace {

MLA_CONTRACT_SUITE(CausalContract);

// Dao-AILab/flash-attention issue 1778: aligned bottom-right, whichever is longer.
TEST_P(CausalContract, LastQuerySeesAllKeysAndEachBeforeOneLess) {
  // With one key visible the LSE is that key's score; with none it is -inf.
  const CheckReport long_q = expect_holds({.q_lens = {5}, .kv_lens = {2}, .causal = true});
  for (size_t query = 0; query < 5; ++query) {
    EXPECT_EQ(std::isinf(long_q.lse[query * 16]), query < 3) << query;
  }
  expect_holds({.q_lens = {2}, .kv_lens = {5}, .causal = true});
  expect_holds({.q_lens = {5}, .kv_lens = {5}, .causal = true});
}

// ROCm/aiter PR 5582: fewer keys than query tokens ended the process.
TEST_P(CausalContract, FewerKeysThanQueriesAreServed) {
  AttentionCase c{.q_lens = {6}, .kv_lens = {4}, .causal = true};
  c.geometry.num_heads = 96;
  expect_holds(c, 200);
}

// vllm-project/vllm issue 21984: more than one query token a request in a decode batch.
TEST_P(CausalContract, SpeculativeBatchesAreServed) {
  AttentionCase c{.q_lens = {4, 4, 4}, .kv_lens = {100, 400, 37}, .causal = true};
  expect_holds(c, 96);
}

// ggml-org/llama.cpp issue 26509: a prompt in two passes differed from one.
TEST_P(CausalContract, TwoPassesOverAPromptEqualOne) {
  AttentionCase c{.q_lens = {70}, .kv_lens = {70}, .causal = true, .splits = {.fixed_tokens = 64}};
  c.geometry.num_heads = 2;
  const CheckReport one = expect_holds(c, 70);
  c.q_lens = {64};
  c.kv_lens = {64};
  const CheckReport first = expect_holds(c, 16);
  c.q_lens = {6};
  c.kv_lens = {70};
  const CheckReport second = expect_holds(c, 12);
  std::vector<float> both = first.out;
  both.insert(both.end(), second.out.begin(), second.out.end());
  ASSERT_EQ(both.size(), one.out.size());
  // Within the rounding of bf16 values below 1: row tiles differ between the passes.
  for (size_t i = 0; i < both.size(); ++i) ASSERT_NEAR(both[i], one.out[i], 0x1p-8) << i;
}

// Masks end anywhere in a page, a block of keys and a split.
TEST_P(CausalContract, MaskEdgesMeetPageAndSplitEdges) {
  for (const int32_t keys : {1, 15, 16, 17, 31, 33, 48, 64, 65}) {
    for (const int32_t queries : {1, 2, 16, 17, 40}) {
      AttentionCase c{.q_lens = {queries, 1}, .kv_lens = {keys, keys}, .causal = true};
      c.geometry.page_size = 16;
      c.geometry.num_heads = 3;
      c.geometry.kv_lora_rank = 32;
      c.geometry.qk_rope_head_dim = 16;
      expect_holds(c);
      c.splits = {.forced_count = 3};
      expect_holds(c);
    }
  }
}

}  // namespace
}  // namespace mla::contract
