#include <cmath>
#include <cstring>

#include "cases/problem.hpp"
#include "contract/contract.hpp"

namespace mla::contract {
namespace {

using cases::LatentRow;
using cases::Poison;
using cases::Problem;

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

MLA_CONTRACT_SUITE(StaleMemoryContract);

// flashinfer-ai/flashinfer issue 941: weight 0 times NaN in unused slots of the last page.
TEST_P(StaleMemoryContract, UnusedSlotsAndPagesNeverMatter) {
  for (const Poison poison : {Poison::kNan, Poison::kInf}) {
    for (const DType dtype : kDtypes) {
      AttentionCase c{.q_lens = {1}, .kv_lens = {13}, .poison = poison};
      c.geometry.page_size = 16;
      c.geometry.dtype = c.geometry.kv_dtype = dtype;
      expect_holds(c);
      c.kv_lens = {33};  // one slot of a page
      c.splits = {.forced_count = 2};
      expect_holds(c);
    }
  }
}

// flashinfer-ai/flashinfer PR 942: a NaN of another request in the same tile.
TEST_P(StaleMemoryContract, NanOfOneRequestNeverReachesAnother) {
  AttentionCase c{.q_lens = {4, 4},
                  .kv_lens = {65, 130},
                  .causal = true,
                  .kernel = GetParam(),
                  .device = device()};
  c.geometry.page_size = 16;
  Problem clean(c);
  const CheckReport expected = cases::check_problem(clean);
  ASSERT_EQ(expected.fault, "");
  Problem dirty(c);
  const LatentRow row = dirty.latent_row(1, 100);
  fill_poison(Poison::kNan, c.geometry.kv_dtype, row.ckv, c.geometry.kv_lora_rank);
  fill_poison(Poison::kNan, c.geometry.kv_dtype, row.kpe, c.geometry.qk_rope_head_dim);
  PagedAttention attention(dirty.config());
  attention.plan(dirty.batch(), Problem::options_of(c));
  dirty.run(attention);
  const size_t rows_of_first = size_t{4} * c.geometry.num_heads;
  const std::vector<float> out = dirty.packed_out();
  EXPECT_EQ(std::memcmp(out.data(), expected.out.data(),
                        rows_of_first * c.geometry.kv_lora_rank * sizeof(float)),
            0);
  EXPECT_EQ(
      std::memcmp(dirty.packed_lse().data(), expected.lse.data(), rows_of_first * sizeof(float)),
      0);
}

// The same row of the table: who attends to a NaN gets one, and no merge of parts drops it.
TEST_P(StaleMemoryContract, NanShowsInEveryRowThatAttendsToIt) {
  for (const int32_t parts : {0, 3}) {
    AttentionCase c{.q_lens = {4, 2},
                    .kv_lens = {65, 130},
                    .causal = true,
                    .splits = {.forced_count = parts},
                    .kernel = GetParam(),
                    .device = device()};
    c.geometry.page_size = 16;
    Problem problem(c);
    const LatentRow row = problem.latent_row(1, 100);
    fill_poison(Poison::kNan, c.geometry.kv_dtype, row.ckv, c.geometry.kv_lora_rank);
    PagedAttention attention(problem.config());
    attention.plan(problem.batch(), Problem::options_of(c));
    problem.run(attention);
    const std::vector<float> out = problem.packed_out(), lse = problem.packed_lse();
    for (size_t r = size_t{4} * c.geometry.num_heads; r < lse.size(); ++r) {
      EXPECT_TRUE(std::isnan(lse[r])) << "row " << r << ", parts " << parts;
      EXPECT_TRUE(std::isnan(out[r * c.geometry.kv_lora_rank])) << "row " << r;
    }
  }
}

// vllm-project/vllm issue 57156: masked entries were clamped to a page 0 full of NaN.
// ROCm/aiter PR 4245: an entry of -1 or 2^31 - 1 beyond the needed ones folded to slot 0.
TEST_P(StaleMemoryContract, TableEntriesBeyondTheKeysAreNeverFollowed) {
  AttentionCase c{.q_lens = {1, 1},
                  .kv_lens = {5, 70},
                  .pages = {3, 9, 1},
                  .pool_pages = 12,
                  .spare_entries = 3};
  expect_holds(c);
  expect_holds(
      {.q_lens = {1}, .kv_lens = {66}, .pages = {7, 2}, .pool_pages = 8, .spare_entries = 2});
  c.kv_lens = {0, 0};
  c.pages = {};
  expect_holds(c);
}

// sgl-project/sglang PR 16678: right at batch 1, NaN in hundreds of rows at larger batch.
TEST_P(StaleMemoryContract, SixtyFourEqualRequestsGiveEqualRows) {
  AttentionCase c{.q_lens = std::vector<int32_t>(64, 1),
                  .kv_lens = std::vector<int32_t>(64, 70),
                  .equal_requests = true};
  c.geometry.num_heads = 4;
  expect_holds(c, 64);
  c.splits = {.fixed_tokens = 32};
  const CheckReport report = expect_holds(c, 64);
  const size_t request = size_t{4} * c.geometry.kv_lora_rank;
  for (size_t i = 1; i < 64; ++i) {
    ASSERT_EQ(
        std::memcmp(report.out.data(), report.out.data() + i * request, request * sizeof(float)),
        0);
  }
}

}  // namespace
}  // namespace mla::contract
