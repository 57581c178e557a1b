#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "mla/attention.hpp"
#include "support/allocations.hpp"

namespace mla {
namespace {

TEST(AllocationUnit, RunNeverAllocatesAndPlanStopsAllocating) {
  constexpr int32_t kRows = 32, kPages = 64, kHeads = 4, kRank = 32;
  const Geometry geometry{.num_heads = kHeads,
                          .kv_lora_rank = kRank,
                          .qk_rope_head_dim = 0,
                          .page_size = 4,
                          .dtype = DType::kFloat32,
                          .kv_dtype = DType::kFloat32};
  PagedAttention attention({.geometry = geometry,
                            .num_pages = kPages,
                            .splits = {.forced_count = 3},
                            .executor = std::make_shared<Executor>(2)});
  std::vector<int32_t> indptr(kRows + 1), kv_indptr(kRows + 1), len(kRows, 8);
  std::iota(indptr.begin(), indptr.end(), 0);
  for (int32_t row = 0; row <= kRows; ++row) kv_indptr[row] = 2 * row;
  std::vector<int32_t> pages(2 * kRows);
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<float> q(kRows * kHeads * kRank, 0.5F), out(q.size()), pool(kPages * 4 * kRank, 1.0F);
  const std::array<int64_t, 3> tokens = {kRows, kHeads, kRank};
  const RunArgs args{
      .q_nope = contiguous_view(q.data(), tokens),
      .cache = split_latent(contiguous_view(pool.data(), std::array<int64_t, 3>{kPages, 4, kRank}),
                            kRank),
      .out = contiguous_view(out.data(), tokens)};
  const auto step = [&] {
    attention.plan(
        {.qo_indptr = indptr, .kv_indptr = kv_indptr, .kv_indices = pages, .kv_len = len},
        {.sm_scale = 1});
    attention.run(args);
  };
  const int64_t at_first = test::num_allocations();
  step();
  EXPECT_GT(test::num_allocations(), at_first) << "the counter counts";
  const int64_t before = test::num_allocations();
  for (int round = 0; round < 5; ++round) step();
  EXPECT_EQ(test::num_allocations(), before);
  EXPECT_EQ(out[0], 1.0F);
}

}  // namespace
}  // namespace mla
