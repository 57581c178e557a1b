#include <algorithm>
#include <cmath>

#include "cases/problem.hpp"
#include "cases/random.hpp"
#include "contract/contract.hpp"
#include "mla/error.hpp"

namespace mla::contract {
namespace {

using cases::Buffer;
using cases::Problem;

MLA_CONTRACT_SUITE(WorkspaceContract);

AttentionConfig bounded_config(const std::string& kernel, SplitPolicy splits) {
  AttentionConfig config{.geometry = AttentionCase{}.geometry,
                         .num_pages = 40,
                         .device = device_of(kernel),
                         .limits = {.max_rows = 6, .max_tokens = 12, .max_listed_pages = 60},
                         .splits = splits,
                         .kernel = kernel,
                         .executor = std::make_shared<Executor>(3)};
  config.geometry.num_heads = 3;
  config.geometry.page_size = 8;
  Geometry narrow = config.geometry;
  narrow.kv_lora_rank = 32;
  narrow.qk_rope_head_dim = 0;
  if (supports(narrow, config.device, {}, kernel)) config.geometry = narrow;
  return config;
}

// flashinfer-ai/flashinfer PR 1357: too small a workspace, and no word of how much is needed.
TEST_P(WorkspaceContract, OneByteTooFewIsRefusedWithBothNumbers) {
  AttentionConfig config = bounded_config(GetParam(), {.forced_count = 4});
  const size_t needed = PagedAttention::scratch_bytes(config);
  ASSERT_GT(needed, 0U);
  Buffer scratch(needed, 0, device());
  config.scratch = {scratch.device_data(), needed - 1};
  try {
    PagedAttention attention(config);
    FAIL() << "not refused";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.parts().what, "scratch.size()");
    EXPECT_NE(error.parts().expected.find(std::to_string(needed)), std::string::npos);
    EXPECT_EQ(error.parts().got, std::to_string(needed - 1));
  }
  config.scratch = {scratch.device_data(), needed};
  PagedAttention attention(config);
}

TEST_P(WorkspaceContract, MisalignedScratchIsRefused) {
  AttentionConfig config = bounded_config(GetParam(), {});
  const size_t needed = PagedAttention::scratch_bytes(config);
  Buffer scratch(needed + 64, 4, device());
  config.scratch = {scratch.device_data(), needed};
  EXPECT_THROW(PagedAttention{config}, InvalidArgument);
}

// flashinfer-ai/flashinfer PR 3741: one size for every batch within the bound. The scratch ends at
// a guard, so that a byte beyond the size shows.
TEST_P(WorkspaceContract, QueriedSizeServesEveryBatchWithinTheLimits) {
  for (const SplitPolicy splits :
       {SplitPolicy{}, SplitPolicy{.forced_count = 7}, SplitPolicy{.fixed_tokens = 5}}) {
    AttentionConfig config = bounded_config(GetParam(), splits);
    Buffer scratch(PagedAttention::scratch_bytes(config), 0, device());
    config.scratch = {scratch.device_data(), scratch.size()};
    PagedAttention attention(config);
    for (uint64_t seed = 0; seed < 40; ++seed) {
      const uint64_t key = cases::row_key(131, seed, 0);
      AttentionCase c{.geometry = config.geometry,
                      .causal = seed % 2 == 0,
                      .pool_pages = 40,
                      .seed = seed,
                      .device = device()};
      const auto rows = static_cast<uint32_t>(seed % 7);
      for (uint32_t i = 0; i < rows; ++i) {
        c.q_lens.push_back(static_cast<int32_t>(cases::random_bits(key, 2 * i) % (12 / rows + 1)));
        c.kv_lens.push_back(static_cast<int32_t>(cases::random_bits(key, 2 * i + 1) % 48));
      }
      Problem problem(c);
      attention.plan(problem.batch(), Problem::options_of(c));
      ASSERT_LE(attention.info().partial_bytes, scratch.size());
      problem.run(attention);
      scratch.download();
      ASSERT_TRUE(scratch.guards_intact()) << "seed " << seed;
    }
  }
}

// All the rows, tokens and keys that the limits allow, in the shapes that ask for most partials.
TEST_P(WorkspaceContract, FullestBatchesStayWithinTheQueriedSize) {
  for (const SplitPolicy splits :
       {SplitPolicy{}, SplitPolicy{.forced_count = kMaxSplits}, SplitPolicy{.fixed_tokens = 1}}) {
    AttentionConfig config = bounded_config(GetParam(), splits);
    Buffer scratch(PagedAttention::scratch_bytes(config), 0, device());
    config.scratch = {scratch.device_data(), scratch.size()};
    PagedAttention attention(config);
    const std::vector<std::pair<std::vector<int32_t>, std::vector<int32_t>>> batches = {
        {{12}, {312}}, {{2, 2, 2, 2, 2, 2}, {52, 52, 52, 52, 52, 52}}, {{1, 11}, {300, 12}}};
    for (const auto& [q_lens, kv_lens] : batches) {
      AttentionCase c{.geometry = config.geometry,
                      .q_lens = q_lens,
                      .kv_lens = kv_lens,
                      .causal = true,
                      .pool_pages = 40,
                      .device = device()};
      if (c.pages_needed() > 40) {  // requests share pages
        for (int32_t i = 0; i < c.pages_needed(); ++i) c.pages.push_back(i % 40);
      }
      Problem problem(c);
      attention.plan(problem.batch(), Problem::options_of(c));
      problem.run(attention);
      scratch.download();
      ASSERT_TRUE(scratch.guards_intact());
      for (const float value : problem.packed_out()) ASSERT_TRUE(std::isfinite(value));
    }
  }
}

// Objects of several buckets may take turns in one block of scratch.
TEST_P(WorkspaceContract, ScratchMayBeSharedByObjectsThatTakeTurns) {
  AttentionConfig large = bounded_config(GetParam(), {.forced_count = 5});
  AttentionConfig small = large;
  small.limits.max_tokens = 4;
  Buffer scratch(
      std::max(PagedAttention::scratch_bytes(large), PagedAttention::scratch_bytes(small)), 0,
      device());
  large.scratch = small.scratch = {scratch.device_data(), scratch.size()};
  PagedAttention first(large);
  PagedAttention second(small);
  AttentionCase c{.geometry = large.geometry,
                  .q_lens = {1, 3},
                  .kv_lens = {40, 100},
                  .pool_pages = 40,
                  .device = device()};
  Problem problem(c);
  first.plan(problem.batch(), Problem::options_of(c));
  second.plan(problem.batch(), Problem::options_of(c));
  problem.run(first);
  const std::vector<float> expected = problem.packed_out();
  for (PagedAttention* attention : {&second, &first, &second}) {
    problem.spoil_outputs();
    problem.run(*attention);
    EXPECT_EQ(problem.packed_out(), expected);
  }
}

}  // namespace
}  // namespace mla::contract
