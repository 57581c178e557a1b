#include <cmath>
#include <numbers>

#include "cases/problem.hpp"
#include "cases/random.hpp"
#include "contract/contract.hpp"
#include "mla/merge.hpp"
#include "mla/reference.hpp"

namespace mla::contract {
namespace {

MLA_CONTRACT_SUITE(LseContract);

// deepseek-ai/FlashMLA PR 77: a row with no visible key got +inf.
TEST_P(LseContract, RowsWithoutVisibleKeyHaveMinusInfinity) {
  const CheckReport report = expect_holds({.q_lens = {4}, .kv_lens = {2}, .causal = true});
  for (size_t row = 0; row < 64; ++row) {
    EXPECT_EQ(std::isinf(report.lse[row]), row < 32) << row;
  }
}

// Dao-AILab/flash-attention issue 2842: an empty request wrote into other requests' LSE.
TEST_P(LseContract, EmptyRequestsLeaveOthersAlone) {
  AttentionCase c{.q_lens = std::vector<int32_t>(64, 1)};
  c.geometry.num_heads = 8;
  for (int32_t i = 0; i < 64; ++i) c.kv_lens.push_back(i == 1 || i == 10 ? 0 : 50 + i % 12);
  expect_holds(c, 256);
}

// flashinfer-ai/flashinfer issues 4485 and 2113: the base depended on the backend.
TEST_P(LseContract, BaseIsThePlansForRaggedAndFixedQueries) {
  for (const std::vector<int32_t>& q_lens : {std::vector<int32_t>{1, 1}, {3, 1}}) {
    AttentionCase c{.q_lens = q_lens, .kv_lens = {70, 9}};
    const CheckReport natural = expect_holds(c);
    c.lse = LseBase::kTwo;
    const CheckReport two = expect_holds(c);
    EXPECT_EQ(natural.out, two.out) << "the base is the LSE's alone";
    for (size_t i = 0; i < two.lse.size(); ++i) {
      EXPECT_NEAR(two.lse[i] * std::numbers::ln2, natural.lse[i], 2e-6);
    }
  }
}

// vllm-project/flash-attention PR 87: another layout with splits than without.
TEST_P(LseContract, LayoutIsTheSameWithAndWithoutSplits) {
  AttentionCase c{.q_lens = {2, 1}, .kv_lens = {300, 77}, .causal = true};
  c.layout.lse_pad = 3;
  const CheckReport whole = expect_holds(c);
  c.splits = {.forced_count = 8};
  const CheckReport split = expect_holds(c);
  ASSERT_EQ(whole.lse.size(), split.lse.size());
  for (size_t i = 0; i < whole.lse.size(); ++i) EXPECT_NEAR(whole.lse[i], split.lse[i], 2e-6);
}

// flashinfer-ai/flashinfer issue 3653: no LSE on one device.
TEST_P(LseContract, ServedForEveryDtypeAndBaseAndLeftOutWhereUnwanted) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    AttentionCase c{.q_lens = {1, 2}, .kv_lens = {40, 0}, .causal = true};
    c.geometry.dtype = c.geometry.kv_dtype = dtype;
    for (const std::optional<LseBase> lse :
         {std::optional<LseBase>{}, {LseBase::kNatural}, {LseBase::kTwo}}) {
      c.lse = lse;
      expect_holds(c);
    }
  }
}

// The outputs of one run over positions [begin, begin + length) of each request's keys.
struct Part {
  std::vector<float> out, lse;
};

// sgl-project/sglang PR 22688: an exhausted request's part of a chunked prefix was garbage.
TEST_P(LseContract, ChunksOfAPrefixMergeIntoOnePass) {
  // Two requests, prefixes of 138 and 64 keys, in chunks of 64: [64, 64], [64, 0], [10, 0].
  AttentionCase whole{.q_lens = {2, 2},
                      .kv_lens = {138, 64},
                      .page_order = cases::PageOrder::kContiguous,
                      .kernel = GetParam(),
                      .device = device()};
  whole.geometry.page_size = 2;  // chunks begin at pages
  whole.geometry.dtype = whole.geometry.kv_dtype = DType::kFloat32;
  whole.layout.q_pad = 5;
  if (!supports(whole.geometry, device(), {}, whole.kernel)) whole.kernel.clear();
  cases::Problem problem(whole);
  const CheckReport one_pass = cases::check_problem(problem);
  ASSERT_EQ(one_pass.fault, "");

  AttentionConfig config = problem.config();
  PagedAttention attention(config);
  std::vector<Part> parts;
  const int32_t chunks[3][2] = {{64, 64}, {64, 0}, {10, 0}};
  for (int32_t chunk = 0; chunk < 3; ++chunk) {
    std::vector<int32_t> kv_indptr = {0};
    std::vector<int32_t> pages;
    const Batch batch = problem.batch();
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t first = batch.kv_indptr[i] + 32 * chunk;
      for (int32_t p = 0; p < chunks[chunk][i] / 2; ++p)
        pages.push_back(batch.kv_indices[first + p]);
      kv_indptr.push_back(static_cast<int32_t>(pages.size()));
    }
    attention.plan({.qo_indptr = batch.qo_indptr,
                    .kv_indptr = kv_indptr,
                    .kv_indices = pages,
                    .kv_len = chunks[chunk]},
                   {.sm_scale = whole.sm_scale, .causal = false});
    problem.spoil_outputs();
    problem.run(attention);
    parts.push_back({problem.packed_out(), problem.packed_lse()});
  }
  const std::array<int64_t, 3> shape = {4, 16, 512};
  std::vector<PartialState> states;
  for (Part& part : parts) {
    states.push_back({.out = contiguous_view(part.out.data(), shape),
                      .lse = {part.lse.data(), {4, 16}, {16, 1}}});
  }
  std::vector<float> merged(one_pass.out.size());
  std::vector<float> merged_lse(one_pass.lse.size());
  merge_states(states, contiguous_view(merged.data(), shape),
               contiguous_view(merged_lse.data(), std::array<int64_t, 2>{4, 16}));
  for (size_t i = 0; i < merged.size(); ++i) ASSERT_NEAR(merged[i], one_pass.out[i], 2e-6);
  for (size_t i = 0; i < merged_lse.size(); ++i) ASSERT_NEAR(merged_lse[i], one_pass.lse[i], 2e-6);
  // The second request was whole in the first chunk: later chunks change no bit.
  for (size_t i = merged.size() / 2; i < merged.size(); ++i) ASSERT_EQ(merged[i], parts[0].out[i]);
}

}  // namespace
}  // namespace mla::contract
