#include "cases/problem.hpp"
#include "contract/contract.hpp"
#include "mla/error.hpp"

namespace mla::contract {
namespace {

using cases::PageOrder;

MLA_CONTRACT_SUITE(LayoutContract);

// flashinfer-ai/flashinfer issue 1341: right for contiguous q and cache only.
TEST_P(LayoutContract, TensorsMayBeSlicesOfLargerOnes) {
  for (const bool separate : {false, true}) {
    for (const bool head_major : {false, true}) {
      AttentionCase c{.q_lens = {2, 1}, .kv_lens = {40, 70}, .causal = true};
      c.geometry.num_heads = 5;
      c.layout = {.joined_q = !separate, .separate_cache = separate, .head_major = head_major};
      expect_holds(c);
      c.layout.q_pad = 3;
      c.layout.out_pad = 1;
      c.layout.lse_pad = 2;
      c.layout.row_pad = 5;
      c.layout.page_pad = 7;
      expect_holds(c);
    }
  }
}

// Vector loads may not ask for more alignment than the elements have.
TEST_P(LayoutContract, TensorsNeedNoMoreAlignmentThanTheirElements) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    AttentionCase c{.q_lens = {2}, .kv_lens = {40}};
    c.geometry.num_heads = 3;
    c.geometry.dtype = c.geometry.kv_dtype = dtype;
    c.layout = {.misaligned = true, .q_pad = 1, .out_pad = 1, .row_pad = 1};
    expect_holds(c);
    c.layout.separate_cache = true;
    expect_holds(c);
  }
}

// A kernel that stores several elements at a time where it can: rows that are aligned to less.
TEST_P(LayoutContract, OutputRowsMayStartAtAnyElement) {
  for (const int32_t pad : {1, 2, 4, 8, 12}) {
    for (const auto& [heads, splits] : {std::pair{16, 1}, {70, 1}, {128, 1}, {128, 3}}) {
      AttentionCase c{.q_lens = {1, 2}, .kv_lens = {300, 90}, .causal = true};
      c.geometry.num_heads = heads;
      c.splits.forced_count = splits;
      c.layout.out_pad = pad;
      expect_holds(c);
    }
  }
}

// flashinfer-ai/flashinfer issue 3219: scattered pages gave another result than contiguous ones.
TEST_P(LayoutContract, PageOrderChangesNoBit) {
  AttentionCase c{.q_lens = {1}, .kv_lens = {370}, .page_order = PageOrder::kContiguous};
  const CheckReport contiguous = expect_holds(c);
  for (const PageOrder order : {PageOrder::kReversed, PageOrder::kScattered}) {
    c.page_order = order;
    EXPECT_EQ(contiguous.out, expect_holds(c).out);
  }
  c.pages = {91, 4, 77, 12, 50, 33};
  c.pool_pages = 92;
  EXPECT_EQ(contiguous.out, expect_holds(c).out);
}

// flashinfer-ai/flashinfer PR 810: only page size 1 had been tested. deepseek-ai/FlashMLA issues 1,
// 3 and 84: other page sizes than 64. sgl-project/sglang-jax issue 1074: 1 became 2.
// ROCm/aiter issue 2996: a page size that the kernel ignored.
TEST_P(LayoutContract, EveryPageSizeGivesTheSameBits) {
  std::vector<float> first;
  for (const int32_t page_size : {64, 1, 2, 3, 8, 16, 24, 32, 33, 48, 100, 128, 192, 1000}) {
    AttentionCase c{.q_lens = {1, 1, 2}, .kv_lens = {50, 1, 101}};
    c.geometry.page_size = page_size;
    c.geometry.num_heads = 4;
    const CheckReport report = expect_holds(c);
    if (first.empty()) first = report.out;
    EXPECT_EQ(report.out, first) << page_size;
  }
}

TEST_P(LayoutContract, OneTokenPagesOfSixteenBits) {
  AttentionCase c{.q_lens = {1}, .kv_lens = {3}, .pages = {5, 2, 9}, .pool_pages = 10};
  c.geometry.page_size = 1;
  expect_holds(c);
}

// NVIDIA/cutlass PR 2221: the number of pages was taken from the table's width.
TEST_P(LayoutContract, PoolMayBeFarLargerThanTheTable) {
  AttentionCase c{.q_lens = {1}, .kv_lens = {64}, .pages = {999, 0, 500, 731}, .pool_pages = 1000};
  c.geometry.page_size = 16;
  expect_holds(c);
}

// flashinfer-ai/flashinfer, _check_cutlass_shape: a table width of a multiple of 128 / page size.
TEST_P(LayoutContract, TableWidthIsFree) {
  AttentionCase c{.q_lens = {1}, .kv_lens = {90}};
  c.geometry.page_size = 32;
  for (c.spare_entries = 0; c.spare_entries < 4; ++c.spare_entries) expect_holds(c);
}

TEST_P(LayoutContract, LengthsMayComeAsTheLastPages) {
  AttentionCase c{.q_lens = {1, 2, 1, 1}, .kv_lens = {64, 65, 0, 1}, .causal = true};
  c.geometry.num_heads = 2;
  const CheckReport by_length = expect_holds(c);
  c.last_page_lens = true;
  EXPECT_EQ(by_length.out, expect_holds(c).out);
}

// deepseek-ai/FlashMLA issue 126: a cache without pages.
TEST_P(LayoutContract, ContiguousCacheNeedsNoTableOfTheCallers) {
  constexpr int64_t kMaxLen = 16;
  AttentionCase c{.q_lens = {1, 2},
                  .kv_lens = {5, 9},
                  .causal = true,
                  .page_order = PageOrder::kContiguous,
                  .pool_pages = 2,
                  .kernel = GetParam(),
                  .device = device()};
  c.geometry.page_size = kMaxLen;  // request b is page b: [2, 16, 576]
  cases::Problem problem(c);
  const CheckReport expected = cases::check_problem(problem);
  ASSERT_EQ(expected.fault, "");

  const int64_t width = c.geometry.latent_width();
  const auto cache =
      contiguous_view(static_cast<const void*>(problem.args().cache.ckv.data),
                      std::array<int64_t, 3>{2, kMaxLen, width}, DType::kBFloat16, device());
  RunArgs args = problem.args();
  args.cache = split_contiguous(cache, c.geometry.kv_lora_rank);
  AttentionConfig config = problem.config();
  config.strides.reset();
  PagedAttention attention(config);
  const std::vector<int32_t> each_its_page = {0, 1, 2};
  const Batch batch = problem.batch();
  attention.plan({.qo_indptr = batch.qo_indptr,
                  .kv_indptr = each_its_page,
                  .kv_indices = each_its_page,
                  .kv_len = batch.kv_len},
                 cases::Problem::options_of(c));
  problem.spoil_outputs();
  problem.upload();
  attention.run(args);
  problem.download();
  EXPECT_EQ(problem.packed_out(), expected.out);
}

// flashinfer-ai/flashinfer issue 3219: the pool came with another page size than planned.
TEST_P(LayoutContract, PoolOfAnotherPageSizeIsRefusedWithBothValues) {
  AttentionCase c{.q_lens = {1}, .kv_lens = {20}, .kernel = GetParam(), .device = device()};
  c.geometry.page_size = 16;
  cases::Problem problem(c);
  PagedAttention attention(problem.config());
  attention.plan(problem.batch(), cases::Problem::options_of(c));
  RunArgs args = problem.args();
  for (ConstTensor<3>* part : {&args.cache.ckv, &args.cache.kpe}) {
    part->shape = {part->shape[0] * 16, 1, part->shape[2]};
    part->stride[0] = part->stride[1];
  }
  try {
    attention.run(args);
    FAIL() << "not refused";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.parts().what, "cache.ckv.shape");
    EXPECT_EQ(error.parts().expected, "[5, 16, 512]");
    EXPECT_EQ(error.parts().got, "[80, 1, 512]");
  }
}

}  // namespace
}  // namespace mla::contract
