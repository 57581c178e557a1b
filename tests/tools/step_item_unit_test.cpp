#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "mla/step_item.hpp"

namespace mla::cli {
namespace {

// A prompt of 10 tokens in blocks of 4; `output_key` tells requests apart.
Request request_of(uint64_t output_key) {
  Request request;
  request.prompt_tokens = 10;
  request.output_tokens = 20;
  request.block_tokens = 4;
  request.block_keys = {11, 12, 13};
  request.output_key = output_key;
  return request;
}

TEST(StepItemUnit, RejectedDraftsAreNotKept) {
  const StepItem item{.request = 0, .begin = 12, .span = 4, .num_drafts = 3, .num_accepted = 1};
  EXPECT_EQ(item.num_rejected(), 2);
  EXPECT_EQ(item.kept_end(), 14) << "the token and the accepted draft";
  const StepItem chunk{.request = 0, .begin = 3, .span = 7};
  EXPECT_EQ(chunk.num_rejected(), 0);
  EXPECT_EQ(chunk.kept_end(), 10);
}

TEST(StepItemUnit, WhatIsKeptHasTheContentOfTheRequestAndRejectedDraftsHaveTheirOwn) {
  const Request request = request_of(77);
  const StepItem item{.request = 0, .begin = 12, .span = 4, .num_drafts = 3, .num_accepted = 1};
  for (int64_t position = 0; position < 14; ++position) {
    EXPECT_EQ(content_key(request, item, position), request.content_key(position)) << position;
  }
  const uint64_t rejected = content_key(request, item, 14);
  EXPECT_NE(rejected, request.content_key(14));
  EXPECT_EQ(content_key(request, item, 15), rejected);
  StepItem next = item;
  next.begin = item.kept_end();
  next.num_accepted = 0;
  EXPECT_NE(content_key(request, next, 15), rejected) << "each step guesses anew";
  EXPECT_NE(content_key(request_of(78), item, 14), rejected);
}

TEST(SpeculationUnit, WithoutDraftsNoneIsAccepted) {
  EXPECT_EQ((Speculation{.seed = 3}.draw_accepted(request_of(1), 10, 0)), 0);
}

TEST(SpeculationUnit, AcceptedDraftsAreTheFirstOnesHoweverManyThereAre) {
  const Speculation speculation{.num_drafts = 8, .seed = 5};
  for (int64_t begin = 0; begin < 500; ++begin) {
    const int32_t of_eight = speculation.draw_accepted(request_of(1), begin, 8);
    for (int32_t drafted = 0; drafted < 8; ++drafted) {
      ASSERT_EQ(speculation.draw_accepted(request_of(1), begin, drafted),
                std::min(drafted, of_eight))
          << "begin " << begin;
    }
  }
}

TEST(SpeculationUnit, SevenOfTenAreRightAndEveryCountOccurs) {
  constexpr int kDraws = 20'000;
  const Speculation speculation{.num_drafts = 3, .seed = 1};
  std::set<int32_t> seen;
  int64_t sum = 0;
  for (int64_t begin = 0; begin < kDraws; ++begin) {
    const int32_t accepted = speculation.draw_accepted(request_of(9), begin, 3);
    seen.insert(accepted);
    sum += accepted;
  }
  EXPECT_EQ(seen, (std::set<int32_t>{0, 1, 2, 3}));
  const double expected = 0.7 + 0.7 * 0.7 + 0.7 * 0.7 * 0.7;
  EXPECT_NEAR(static_cast<double>(sum) / kDraws, expected, 0.05);
}

TEST(SpeculationUnit, VerdictsDependOnSeedRequestAndPlace) {
  const auto verdicts = [](uint64_t seed, uint64_t output_key, int64_t first) {
    std::vector<int32_t> accepted;
    for (int64_t begin = first; begin < first + 50; ++begin) {
      accepted.push_back(Speculation{.num_drafts = 4, .seed = seed}.draw_accepted(
          request_of(output_key), begin, 4));
    }
    return accepted;
  };
  EXPECT_EQ(verdicts(1, 1, 0), verdicts(1, 1, 0));
  EXPECT_NE(verdicts(1, 1, 0), verdicts(2, 1, 0));
  EXPECT_NE(verdicts(1, 1, 0), verdicts(1, 2, 0));
  EXPECT_NE(verdicts(1, 1, 0), verdicts(1, 1, 50));
}

}  // namespace
}  // namespace mla::cli
