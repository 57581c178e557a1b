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

// The same, where it was in the memory of a block that works on the other request later: a kernel
// that keeps two blocks of keys there has NaN in both, and the next keys fill a page of one.
TEST_P(StaleMemoryContract, NanOfOneRequestNeverReachesALaterOneOfFewerKeys) {
  constexpr int32_t kLongLen = 128, kShortLen = 9;
  for (const int32_t heads : {1, 65}) {
    for (const int32_t page_size : {8, 16, 32}) {
      const int64_t pairs = heads == 1 ? 150 : 70;  // more requests than any GPU has workers
      AttentionCase c{.q_lens = std::vector<int32_t>(2 * pairs, 1),
                      .splits = {.forced_count = 1},
                      .kernel = GetParam(),
                      .device = device()};
      for (int64_t i = 0; i < pairs; ++i) {
        c.kv_lens.insert(c.kv_lens.end(), {kLongLen, kShortLen});
      }
      c.geometry.num_heads = heads;
      c.geometry.page_size = page_size;
      Problem problem(c);
      PagedAttention attention(problem.config());
      attention.plan(problem.batch(), Problem::options_of(c));
      problem.run(attention);
      const std::vector<float> expected = problem.packed_out();
      for (int64_t i = 0; i < pairs; ++i) {
        for (int32_t key = 0; key < kLongLen; ++key) {
          const LatentRow row = problem.latent_row(2 * i, key);
          fill_poison(Poison::kNan, c.geometry.kv_dtype, row.ckv, c.geometry.kv_lora_rank);
          fill_poison(Poison::kNan, c.geometry.kv_dtype, row.kpe, c.geometry.qk_rope_head_dim);
        }
      }
      problem.run(attention);
      const std::vector<float> out = problem.packed_out();
      const size_t request = static_cast<size_t>(heads) * c.geometry.kv_lora_rank;
      for (int64_t i = 1; i < 2 * pairs; i += 2) {
        ASSERT_EQ(std::memcmp(&out[i * request], &expected[i * request], request * sizeof(float)),
                  0)
            << "request " << i << ", " << heads << " heads, pages of " << page_size;
      }
    }
  }
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

// The two above, for every number of pages that a block of keys may have, the last one full or not.
TEST_P(StaleMemoryContract, LastPagesOfAnyLengthAreReadToTheirKeys) {
  for (const int32_t page_size : {8, 16, 24, 32, 64, 128}) {
    for (const auto& [heads, rope] : {std::pair{4, 64}, {4, 0}, {65, 64}, {65, 0}}) {
      AttentionCase c{
          .kv_lens = {1, 7, 8, 9, 16, 17, 24, 31, 33, 40, 47, 57, 63, 64, 65, 72, 81, 97, 121, 129},
          .spare_entries = 3};
      c.q_lens.assign(c.kv_lens.size(), 1);
      c.geometry.num_heads = heads;
      c.geometry.qk_rope_head_dim = rope;
      c.geometry.page_size = page_size;
      expect_holds(c, 80);
    }
  }
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

// Where a request stands in a worker's list may not matter either, nor what is before it: here
// three blocks of keys, so that kernels whose roles take turns at blocks begin with either.
TEST_P(StaleMemoryContract, EqualRequestsGiveEqualRowsWhereverTheyAreInTheBatch) {
  constexpr size_t kRequests = 300;
  AttentionCase c{.q_lens = std::vector<int32_t>(kRequests, 1),
                  .kv_lens = std::vector<int32_t>(kRequests, 150),
                  .equal_requests = true,
                  .splits = {.fixed_tokens = 192}};
  c.geometry.num_heads = 2;
  const CheckReport report = expect_holds(c, 32);
  const size_t request = size_t{2} * c.geometry.kv_lora_rank;
  for (size_t i = 1; i < kRequests; ++i) {
    ASSERT_EQ(
        std::memcmp(report.out.data(), report.out.data() + i * request, request * sizeof(float)), 0)
        << "request " << i;
  }
}

}  // namespace
}  // namespace mla::contract
