#include <gtest/gtest.h>

#include <random>
#include <set>

#include "core/tensor_checks.hpp"

namespace mla {
namespace {

std::set<uint64_t> bytes_of(const ByteRows& rows) {
  std::set<uint64_t> bytes;
  for (uint64_t i = 0; i < rows.extent[0]; ++i) {
    for (uint64_t j = 0; j < rows.extent[1]; ++j) {
      for (uint64_t k = 0; k < rows.width; ++k) {
        bytes.insert(rows.begin + i * rows.stride[0] + j * rows.stride[1] + k);
      }
    }
  }
  return bytes;
}

bool do_overlap(const ByteRows& a, const ByteRows& b) {
  const std::set<uint64_t> others = bytes_of(b);
  for (const uint64_t byte : bytes_of(a)) {
    if (others.contains(byte)) return true;
  }
  return false;
}

TEST(OverlapProperty, NoSharedByteGoesUnseen) {
  std::mt19937 random(20240504);
  const auto draw = [&](uint64_t most) { return random() % (most + 1); };
  int overlapping = 0, apart = 0;
  for (int i = 0; i < 20000; ++i) {
    ByteRows pair[2];
    for (ByteRows& rows : pair) {
      rows = {.begin = draw(60),
              .extent = {draw(4), draw(4)},
              .stride = {draw(24), draw(24)},
              .width = draw(5)};
    }
    if (draw(1) == 0) pair[1].stride = pair[0].stride;
    const bool told = may_overlap(pair[0], pair[1]);
    EXPECT_EQ(told, may_overlap(pair[1], pair[0]));
    if (do_overlap(pair[0], pair[1])) {
      EXPECT_TRUE(told) << "case " << i;
      ++overlapping;
    }
    apart += static_cast<int>(!told);
  }
  EXPECT_GT(overlapping, 1000);
  EXPECT_GT(apart, 1000);
}

// Parts of the rows of one buffer [tokens, heads, 24] of fp32, and of [tokens, 10 rows].
TEST(OverlapUnit, PartsOfOneBuffersRowsAreToldApart) {
  const ByteRows rank{.begin = 0, .extent = {3, 2}, .stride = {192, 96}, .width = 64};
  const ByteRows rope{.begin = 64, .extent = {3, 2}, .stride = {192, 96}, .width = 32};
  EXPECT_FALSE(may_overlap(rank, rope));
  EXPECT_TRUE(may_overlap(rank, {64, {3, 2}, {192, 96}, 36})) << "into the next row";
  EXPECT_TRUE(may_overlap(rank, {60, {3, 2}, {192, 96}, 32})) << "into the row before";

  const ByteRows out{.begin = 0, .extent = {3, 2}, .stride = {160, 64}, .width = 64};
  const ByteRows lse{.begin = 128, .extent = {3, 2}, .stride = {160, 4}, .width = 4};
  EXPECT_FALSE(may_overlap(out, lse)) << "a token's outputs side by side";
  EXPECT_FALSE(may_overlap(lse, out));
}

TEST(OverlapUnit, NothingOverlapsNoRows) {
  const ByteRows rows{.begin = 0, .extent = {3, 2}, .stride = {192, 96}, .width = 64};
  EXPECT_TRUE(may_overlap(rows, rows));
  EXPECT_FALSE(may_overlap(rows, {.begin = 0, .extent = {0, 2}, .stride = {0, 96}, .width = 64}));
  EXPECT_FALSE(may_overlap(ByteRows{}, rows));
}

}  // namespace
}  // namespace mla
