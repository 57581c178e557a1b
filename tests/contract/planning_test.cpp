#include <algorithm>
#include <cstring>
#include <vector>

#include "cases/random.hpp"
#include "contract/contract.hpp"

namespace mla::contract {
namespace {

MLA_CONTRACT_SUITE(PlanningContract);

// vllm-project/vllm PR 48045: more row tiles than processors made the number of parts 0.
TEST_P(PlanningContract, AnyNumberOfQueriesOfOneRequestIsServed) {
  for (const int32_t queries : {1, 2, 3, 5, 16, 17, 63, 64, 65, 67, 127, 300, 511, 1024}) {
    AttentionCase c{
        .geometry = small_geometry(16), .q_lens = {queries}, .kv_lens = {300}, .causal = true};
    expect_holds(c, 64);
  }
  AttentionCase c{
      .geometry = small_geometry(128), .q_lens = {67}, .kv_lens = {300}, .causal = true};
  expect_holds(c, 128);
}

// vllm-project/vllm PR 14253: a mixed batch was cut at the wrong place.
TEST_P(PlanningContract, MixedBatchEqualsItsRequestsAlone) {
  AttentionCase c{.q_lens = {1, 1, 7, 1, 33},
                  .kv_lens = {900, 3, 7, 64, 40},
                  .causal = true,
                  .equal_requests = true,
                  .splits = {.fixed_tokens = 128}};
  c.geometry.num_heads = 4;
  const CheckReport together = expect_holds(c, 100);
  const size_t token = size_t{4} * c.geometry.kv_lora_rank;
  size_t at = 0;
  for (size_t i = 0; i < c.q_lens.size(); ++i) {
    AttentionCase one = c;
    one.q_lens = {c.q_lens[i]};
    one.kv_lens = {c.kv_lens[i]};
    const CheckReport alone = expect_holds(one, 16);
    const size_t size = token * static_cast<size_t>(c.q_lens[i]);
    ASSERT_EQ(alone.out.size(), size);
    EXPECT_EQ(std::memcmp(alone.out.data(), together.out.data() + at, size * sizeof(float)), 0)
        << "request " << i;
    at += size;
  }
}

// Tiles of one step or two follow each other: what is loaded for the next must not come too soon,
// and nobody may wait for what has come and gone.
TEST_P(PlanningContract, ShortTilesFollowEachOther) {
  for (const int32_t heads : {16, 128}) {
    for (const int32_t tokens : {64, 128}) {
      AttentionCase c{.geometry = small_geometry(heads),
                      .q_lens = std::vector<int32_t>(100, 1),
                      .kv_lens = std::vector<int32_t>(100, 470),
                      .splits = {.fixed_tokens = tokens}};
      expect_holds(c, 200);
    }
  }
}

// Few rows of many parts may be merged by more threads each than many rows.
TEST_P(PlanningContract, PartsAddUpToTheSameBitsHoweverManyRowsThereAre) {
  // Many parts; and two, with rows for several warps each, a warp each and several a warp.
  struct Rows {
    int32_t keys;
    std::vector<size_t> requests;
  };
  for (const Rows& rows : {Rows{2000, {1, 3, 5, 8, 20}}, Rows{128, {1, 9, 17, 34, 200}}}) {
    AttentionCase c{.equal_requests = true, .splits = {.fixed_tokens = 64}};
    c.geometry = small_geometry(16);
    CheckReport alone;
    for (const size_t requests : rows.requests) {
      c.q_lens.assign(requests, 1);
      c.kv_lens.assign(requests, rows.keys);
      CheckReport report = expect_holds(c, 16);
      if (requests == 1) alone = report;
      const size_t size = alone.out.size();
      ASSERT_EQ(report.out.size(), size * requests);
      for (size_t i = 0; i < requests; ++i) {
        EXPECT_EQ(std::memcmp(report.out.data() + i * size, alone.out.data(), size * sizeof(float)),
                  0)
            << "request " << i << " of " << requests << " with " << rows.keys << " keys";
      }
    }
  }
}

// Rows of one to forty parts, and more of them than there are warps: each is merged once, whoever's
// share it falls to.
TEST_P(PlanningContract, RowsOfFewAndOfManyPartsAreMergedTogether) {
  AttentionCase c{.q_lens = {1}, .kv_lens = {2500}, .splits = {.fixed_tokens = 64}};
  c.geometry.num_heads = 80;
  for (const int32_t kv_len : {65, 128, 190, 64, 600, 1, 70, 300, 1, 130, 400, 90}) {
    for (const int32_t q_len : {1, 2, 1, 2}) {
      c.q_lens.push_back(q_len);
      c.kv_lens.push_back(kv_len);
    }
  }
  expect_holds(c);
}

// flashinfer-ai/flashinfer PR 890: a scheduler state could wait for ever. ctest's timeout is the
// watchdog.
TEST_P(PlanningContract, RandomPlansEndAndEqualTheReference) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const auto draw = [&](uint32_t column, int32_t low, int32_t high) {
      const uint64_t bits = cases::random_bits(cases::row_key(seed, 31, 0), column);
      return low + static_cast<int32_t>((bits * static_cast<uint64_t>(high - low + 1)) >> 32);
    };
    AttentionCase c{.name = "random plan",
                    .geometry = small_geometry(draw(0, 1, 4)),
                    .causal = draw(1, 0, 1) == 1,
                    .seed = seed};
    const int32_t rows = draw(2, 1, draw(3, 0, 3) == 0 ? 64 : 8);
    for (int32_t i = 0; i < rows; ++i) {
      const auto column = static_cast<uint32_t>(10 + 3 * i);
      c.q_lens.push_back(draw(column, 0, 4) == 0 ? 0 : draw(column, 1, 3));
      const int32_t longest = draw(column + 1, 0, 9) == 0 ? 4096 : 300;
      c.kv_lens.push_back(draw(column + 2, 0, longest));
    }
    switch (draw(4, 0, 3)) {
      case 0:
        c.splits.forced_count = draw(5, 1, kMaxSplits);
        break;
      case 1:
        c.splits.fixed_tokens = draw(5, 1, 2000);
        break;
      default:
        break;
    }
    expect_holds(c, 24);
  }
}

// vllm-project/vllm PR 24966: more than one split with larger batches hung.
TEST_P(PlanningContract, ForcedSplitsOfLargerBatchesEnd) {
  for (const int32_t rows : {2, 8, 64}) {
    for (const int32_t splits : {2, 5, 32}) {
      AttentionCase c{.geometry = small_geometry(2),
                      .q_lens = std::vector<int32_t>(static_cast<size_t>(rows), 1),
                      .kv_lens = std::vector<int32_t>(static_cast<size_t>(rows), 1024),
                      .splits = {.forced_count = splits}};
      const CheckReport report = expect_holds(c, 8);
      EXPECT_GT(report.plan.num_splits, 1);
      EXPECT_LE(report.plan.num_splits, splits);
    }
  }
}

// Parts are of the request's own making: any fixed size, to the cap of kMaxSplits parts.
TEST_P(PlanningContract, FixedSplitSizesAreServedUpToTheCap) {
  for (const int32_t size : {1, 3, 64, 100000}) {
    AttentionCase c{.geometry = small_geometry(2),
                    .q_lens = {1, 2},
                    .kv_lens = {700, 5},
                    .causal = true,
                    .splits = {.fixed_tokens = size}};
    const CheckReport report = expect_holds(c);
    EXPECT_LE(report.plan.num_splits, kMaxSplits);
    EXPECT_EQ(report.plan.num_splits > 1, size < 700);
  }
}

}  // namespace
}  // namespace mla::contract
