#include <gtest/gtest.h>

#include "mla/usage_error.hpp"
#include "mla/workload.hpp"

namespace mla::cli {
namespace {

TraceRequest request_of(int64_t input, int64_t output, std::vector<uint64_t> ids) {
  return {.input_length = input, .output_length = output, .hash_ids = std::move(ids)};
}

// Tokens from the start on which two requests hold the same content.
int64_t common_prefix(const Request& a, const Request& b) {
  int64_t tokens = 0;
  while (tokens < std::min(a.stored_tokens(), b.stored_tokens()) &&
         a.content_key(tokens) == b.content_key(tokens)) {
    ++tokens;
  }
  return tokens;
}

TEST(WorkloadUnit, LengthsStayAtScaleOne) {
  const auto requests = make_workload({request_of(1300, 7, {1, 2, 3})}, 1);
  EXPECT_EQ(requests[0].prompt_tokens, 1300);
  EXPECT_EQ(requests[0].output_tokens, 7);
  EXPECT_EQ(requests[0].block_tokens, 512);
  EXPECT_EQ(requests[0].stored_tokens(), 1306);
}

TEST(WorkloadUnit, LengthsAndBlocksScaleAlike) {
  const auto requests = make_workload({request_of(1300, 100, {1, 2, 3})}, 0.125);
  EXPECT_EQ(requests[0].prompt_tokens, 162);  // 2 * 64 + 276 / 8
  EXPECT_EQ(requests[0].output_tokens, 12);
  EXPECT_EQ(requests[0].block_tokens, 64);
}

TEST(WorkloadUnit, NothingFallsBelowOneToken) {
  const auto requests = make_workload({request_of(3, 1, {1}), request_of(513, 1, {1, 2})}, 1e-6);
  for (const Request& request : requests) {
    EXPECT_EQ(request.block_tokens, 1);
    EXPECT_EQ(request.prompt_tokens, 1);
    EXPECT_EQ(request.output_tokens, 1);
    EXPECT_EQ(request.stored_tokens(), 1);
  }
}

// Every prompt token has a block, also where 512 * scale is no whole number.
TEST(WorkloadUnit, EveryPromptTokenHasABlockAtEveryScale) {
  for (const double scale : {0.001, 0.01, 0.1, 0.3, 0.777, 1.0, 1.9, 10.0}) {
    for (const int64_t input : {1, 511, 512, 513, 1023, 1024, 50 * 512 - 1}) {
      std::vector<uint64_t> ids(static_cast<size_t>((input + 511) / 512));
      const auto requests = make_workload({request_of(input, 1, ids)}, scale);
      const Request& request = requests[0];
      EXPECT_LE(request.prompt_tokens,
                static_cast<int64_t>(request.block_keys.size()) * request.block_tokens)
          << "scale " << scale << " input " << input;
      EXPECT_NE(request.content_key(request.prompt_tokens - 1), 0U);
    }
  }
}

TEST(WorkloadUnit, EqualPrefixesHaveEqualContentAndNothingElseHas) {
  const auto requests =
      make_workload({request_of(1100, 9, {1, 2, 3}), request_of(1536, 9, {1, 2, 4}),
                     request_of(1100, 9, {5, 2, 3}), request_of(1100, 9, {1, 2, 3})},
                    1);
  EXPECT_EQ(common_prefix(requests[0], requests[1]), 1024);
  EXPECT_EQ(common_prefix(requests[0], requests[2]), 0) << "block 2 after another block";
  EXPECT_EQ(common_prefix(requests[0], requests[3]), 1100) << "what they generate is their own";
}

TEST(WorkloadUnit, PageKeysAreEqualExactlyWhereAllTokensAreEqual) {
  const auto requests =
      make_workload({request_of(1100, 9, {1, 2, 3}), request_of(1536, 9, {1, 2, 4})}, 1);
  for (const int64_t page_size : {1, 16, 48, 64, 100, 512, 1000}) {
    const auto a = requests[0].page_keys(page_size);
    const auto b = requests[1].page_keys(page_size);
    ASSERT_EQ(static_cast<int64_t>(a.size()), 1100 / page_size);
    ASSERT_EQ(static_cast<int64_t>(b.size()), 1536 / page_size);
    for (size_t page = 0; page < a.size(); ++page) {
      const int64_t end = (static_cast<int64_t>(page) + 1) * page_size;
      EXPECT_EQ(a[page] == b[page], end <= 1024) << "page size " << page_size << " page " << page;
    }
  }
}

TEST(WorkloadUnit, ArrivalsCountFromTheFirstRequest) {
  auto first = request_of(1, 1, {1});
  auto second = request_of(1, 1, {1});
  first.timestamp_ms = 1000;
  second.timestamp_ms = 1250;
  const auto requests = make_workload({first, second}, 1);
  EXPECT_EQ(requests[0].arrival_ms, 0);
  EXPECT_EQ(requests[1].arrival_ms, 250);
}

TEST(WorkloadUnit, LengthThatGrowsBeyondTheLimitIsRefused) {
  EXPECT_THROW(make_workload({request_of(1, kMaxTraceLength, {1})}, 1.5), UsageError);
}

}  // namespace
}  // namespace mla::cli
