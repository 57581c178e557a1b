#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "mla/attention.hpp"
#include "mla/error.hpp"
#include "mla/supports.hpp"

// The plan/run object by itself: its life, its leases, what stays in force when a call is refused.
// What it computes is the contract suite's matter.
namespace mla {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

AttentionConfig small_config() {
  return {.geometry = {.num_heads = 2,
                       .kv_lora_rank = 4,
                       .qk_rope_head_dim = 2,
                       .page_size = 2,
                       .dtype = DType::kFloat32,
                       .kv_dtype = DType::kFloat32},
          .num_pages = 4,
          .limits = {.max_rows = 4, .max_tokens = 8, .max_listed_pages = 16},
          .kernel = "reference",
          .executor = std::make_shared<Executor>(2)};
}

// Tensors for `tokens` query tokens; every key row holds its slot number, so that attending to one
// key gives that number.
struct Tensors {
  int64_t tokens;
  std::vector<float> q_nope, q_pe, pool, out, lse;

  explicit Tensors(int64_t num_tokens)
      : tokens(num_tokens),
        q_nope(static_cast<size_t>(num_tokens * 2 * 4), 0.0F),
        q_pe(static_cast<size_t>(num_tokens * 2 * 2), 0.0F),
        pool(4 * 2 * 6),
        out(q_nope.size(), kNan),
        lse(static_cast<size_t>(num_tokens * 2), kNan) {
    for (size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<float>(i / 6);
  }

  RunArgs args() {
    const auto layer = contiguous_view(pool.data(), std::array<int64_t, 3>{4, 2, 6});
    return {.q_nope = contiguous_view(q_nope.data(), std::array<int64_t, 3>{tokens, 2, 4}),
            .q_pe = contiguous_view(q_pe.data(), std::array<int64_t, 3>{tokens, 2, 2}),
            .cache = split_latent(layer, 4),
            .out = contiguous_view(out.data(), std::array<int64_t, 3>{tokens, 2, 4}),
            .lse = contiguous_view(lse.data(), std::array<int64_t, 2>{tokens, 2})};
  }
  float first_of(int64_t token) const { return out[static_cast<size_t>(token * 2 * 4)]; }
};

const std::vector<int32_t> kQo = {0, 1, 2}, kKvIndptr = {0, 1, 2}, kPages = {3, 1};
const std::vector<int32_t> kOneKey = {1, 1};

Batch two_rows() {
  return {.qo_indptr = kQo, .kv_indptr = kKvIndptr, .kv_indices = kPages, .kv_len = kOneKey};
}

TEST(AttentionUnit, AttendsToEachRequestsOwnKeys) {
  PagedAttention attention(small_config());
  Tensors tensors(2);
  attention.plan(two_rows(), {.sm_scale = 1});
  attention.run(tensors.args());
  EXPECT_EQ(tensors.first_of(0), 6);  // page 3, slot 0
  EXPECT_EQ(tensors.first_of(1), 2);  // page 1, slot 0
  EXPECT_THAT(tensors.lse, testing::Each(0.0F));
  EXPECT_EQ(attention.kernel(), "reference");
  EXPECT_EQ(attention.info().num_tokens, 2);
}

TEST(AttentionUnit, RunBeforePlanIsRefused) {
  PagedAttention attention(small_config());
  Tensors tensors(2);
  EXPECT_THROW(attention.run(tensors.args()), InvalidState);
  EXPECT_THROW(attention.info(), InvalidState);
  EXPECT_THROW(attention.qo_indptr_buf(), InvalidState);
  EXPECT_THROW(attention.kv_len_buf(), InvalidState);
}

TEST(AttentionUnit, RefusedPlanLeavesThePreviousOneInForce) {
  PagedAttention attention(small_config());
  Tensors tensors(2);
  attention.plan(two_rows(), {.sm_scale = 1});
  const std::vector<int32_t> decreasing = {0, 2, 1};
  Batch bad = two_rows();
  bad.qo_indptr = decreasing;
  EXPECT_THROW(attention.plan(bad, {.sm_scale = 1}), InvalidArgument);
  EXPECT_THROW(attention.plan(two_rows(), {}), InvalidArgument) << "no sm_scale";
  attention.run(tensors.args());
  EXPECT_EQ(tensors.first_of(0), 6);
  EXPECT_EQ(tensors.first_of(1), 2);
}

TEST(AttentionUnit, PlanKeepsNoReferenceToTheCallersArrays) {
  PagedAttention attention(small_config());
  Tensors tensors(2);
  {
    std::vector<int32_t> qo = kQo, kv = kKvIndptr, pages = kPages, len = kOneKey;
    attention.plan({.qo_indptr = qo, .kv_indptr = kv, .kv_indices = pages, .kv_len = len},
                   {.sm_scale = 1});
    for (auto* array : {&qo, &kv, &pages, &len}) std::fill(array->begin(), array->end(), -7);
  }
  attention.run(tensors.args());
  EXPECT_EQ(tensors.first_of(0), 6);
}

TEST(AttentionUnit, LeaseWritesEveryRowOfTheBucketAndKeepsItsBuffers) {
  AttentionConfig config = small_config();
  config.bucket = Bucket{.num_rows = 4, .num_tokens = 6};
  PagedAttention attention(config);
  Tensors tensors(6);
  attention.plan(two_rows(), {.sm_scale = 1});
  const auto qo = attention.qo_indptr_buf();
  const auto len = attention.kv_len_buf();
  EXPECT_THAT(std::vector<int32_t>(qo.data, qo.data + 5), testing::ElementsAre(0, 1, 2, 2, 2));
  EXPECT_THAT(std::vector<int32_t>(len.data, len.data + 4), testing::ElementsAre(1, 1, 0, 0));
  attention.run(tensors.args());
  EXPECT_EQ(tensors.first_of(0), 6);
  for (int64_t token = 2; token < 6; ++token) {
    EXPECT_EQ(tensors.first_of(token), 0);
    EXPECT_EQ(tensors.lse[static_cast<size_t>(token * 2)], -std::numeric_limits<float>::infinity());
  }
  attention.plan({.qo_indptr = std::span(kQo).first(1), .kv_indptr = std::span(kKvIndptr).first(1)},
                 {.sm_scale = 1});
  EXPECT_EQ(attention.qo_indptr_buf().data, qo.data);
  EXPECT_EQ(attention.kv_len_buf().data, len.data);
  attention.run(tensors.args());
  EXPECT_EQ(tensors.first_of(0), 0);
}

TEST(AttentionUnit, LeaseTakesThePlansTokensToo) {
  AttentionConfig config = small_config();
  config.bucket = Bucket{.num_rows = 4, .num_tokens = 6};
  PagedAttention attention(config);
  Tensors tensors(2);
  attention.plan(two_rows(), {.sm_scale = 1});
  attention.run(tensors.args());
  EXPECT_EQ(tensors.first_of(1), 2);
  Tensors other(3);
  EXPECT_THROW(attention.run(other.args()), InvalidArgument);
}

TEST(AttentionUnit, LentScratchIsEnoughAtItsExactSizeAndRefusedBelow) {
  AttentionConfig config = small_config();
  config.splits.forced_count = 2;
  const size_t bytes = PagedAttention::scratch_bytes(config);
  std::byte* memory = static_cast<std::byte*>(std::aligned_alloc(64, bytes));
  std::memset(memory, 0xff, bytes);
  config.scratch = {memory, bytes - 1};
  try {
    PagedAttention attention(config);
    FAIL() << "one byte short";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.parts().what, "scratch.size()");
    EXPECT_THAT(error.parts().expected, testing::HasSubstr(std::to_string(bytes)));
    EXPECT_EQ(error.parts().got, std::to_string(bytes - 1));
  }
  config.scratch = {memory, bytes};
  PagedAttention attention(config);
  Tensors tensors(2);
  attention.plan(two_rows(), {.sm_scale = 1});
  attention.run(tensors.args());
  EXPECT_EQ(tensors.first_of(0), 6);
  std::free(memory);
}

// Scratch for the worst plan within the default limits is far more than any plan takes.
TEST(AttentionUnit, FixedSplitsOfAFullSizedModelCanBeCreatedWithDefaultLimits) {
  const AttentionConfig config{
      .geometry = {.num_heads = 128, .kv_lora_rank = 512, .qk_rope_head_dim = 64, .page_size = 64},
      .num_pages = 1000,
      .splits = {.fixed_tokens = 2048}};
  EXPECT_GT(PagedAttention::scratch_bytes(config), size_t{1} << 30);
  EXPECT_NO_THROW(PagedAttention{config});
}

// Scores whose last place is worth more than a weight can stand. The row still sees its keys: a
// weight of 1 for the largest, never an empty row.
TEST(AttentionUnit, HugeFiniteScoresKeepTheirLargestKey) {
  for (const KernelVerdict& kernel : supports(small_config().geometry).considered) {
    if (!kernel.refusal.empty()) continue;
    for (const int32_t heads : {1, 2, 40}) {
      for (const float value : {1e3F, 3e4F, 1e6F, -1e8F}) {
        constexpr int32_t kWidth = 576;
        constexpr int32_t kRank = 512;
        PagedAttention attention({.geometry = {.num_heads = heads,
                                               .kv_lora_rank = kRank,
                                               .qk_rope_head_dim = kWidth - kRank,
                                               .page_size = 4,
                                               .dtype = DType::kFloat32,
                                               .kv_dtype = DType::kFloat32},
                                  .num_pages = 1,
                                  .kernel = kernel.kernel});
        const std::vector<int32_t> qo = {0, 1}, kv = {0, 1}, page = {0}, len = {2};
        attention.plan({.qo_indptr = qo, .kv_indptr = kv, .kv_indices = page, .kv_len = len},
                       {.sm_scale = 0.0721688F});
        std::vector<float> pool(4 * kWidth, value);
        for (int32_t c = 0; c < kWidth; ++c) pool[static_cast<size_t>(kWidth + c)] = value / 2;
        std::vector<float> q(static_cast<size_t>(heads * kWidth), value);
        std::vector<float> out(static_cast<size_t>(heads * kRank));
        std::vector<float> lse(static_cast<size_t>(heads));
        const auto query = contiguous_view(q.data(), std::array<int64_t, 3>{1, heads, kWidth});
        const auto layer = contiguous_view(pool.data(), std::array<int64_t, 3>{1, 4, kWidth});
        attention.run({.q_nope = columns(query, 0, kRank),
                       .q_pe = columns(query, kRank, kWidth - kRank),
                       .cache = split_latent(layer, kRank),
                       .out = contiguous_view(out.data(), std::array<int64_t, 3>{1, heads, kRank}),
                       .lse = contiguous_view(lse.data(), std::array<int64_t, 2>{1, heads})});
        const double score = double{value} * double{value} * kWidth * double{0.0721688F};
        for (const float got : out) ASSERT_NEAR(got / value, 1, 1e-5) << kernel.kernel;
        for (const float got : lse) ASSERT_NEAR(got / score, 1, 1e-6) << kernel.kernel;
      }
    }
  }
}

TEST(AttentionUnit, CaptureOnTheCpuIsRefused) {
  AttentionConfig config = small_config();
  config.capture = true;
  EXPECT_THROW(PagedAttention{config}, InvalidArgument);
}

TEST(AttentionUnit, IdleRankRunsNothingOnEmptyViews) {
  PagedAttention attention(small_config());
  const std::vector<int32_t> none = {0};
  attention.plan({.qo_indptr = none, .kv_indptr = none}, {.sm_scale = 1});
  attention.run({});
}

TEST(AttentionUnit, SupportsAnswersWithReasons) {
  const Geometry geometry = small_config().geometry;
  const Support any = supports(geometry);
  EXPECT_TRUE(any);
  EXPECT_FALSE(any.capturable);
  EXPECT_FALSE(any.considered.empty());
  EXPECT_EQ(supports(geometry, {}, std::nullopt, "reference").kernel, "reference");
  EXPECT_THAT(supports(geometry, {}, std::nullopt, "none such").reason,
              testing::HasSubstr("none such"));
  Geometry mixed = geometry;
  mixed.kv_dtype = DType::kFloat16;
  EXPECT_THAT(supports(mixed).reason, testing::HasSubstr("fp32/fp16"));
  EXPECT_THAT(supports(geometry, {DeviceKind::kCuda, 0}).reason, testing::HasSubstr("cuda:0"));
}

}  // namespace
}  // namespace mla
