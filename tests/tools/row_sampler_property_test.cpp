#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "mla/row_sampler.hpp"

namespace mla::cli {
namespace {

using Row = std::tuple<int64_t, int32_t, int32_t>;  // token, layer, head

class RowSamplerProperty : public testing::Test {
 protected:
  int64_t draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  std::vector<StepItem> draw_items() {
    std::vector<StepItem> items(static_cast<size_t>(draw(1, 9)));
    for (size_t i = 0; i < items.size(); ++i) {
      items[i] = {.request = static_cast<int64_t>(i),
                  .begin = draw(0, 50),
                  .span = static_cast<int32_t>(draw(0, 3) == 0 ? draw(1, 90) : 1)};
    }
    return items;
  }

  std::mt19937 random_{1};
};

TEST_F(RowSamplerProperty, RowsAreOfTheStepAndNoneComesTwice) {
  for (int i = 0; i < 500; ++i) {
    SCOPED_TRACE(i);
    const auto layers = static_cast<int32_t>(draw(1, 4));
    const auto heads = static_cast<int32_t>(draw(1, 6));
    const std::vector<StepItem> items = draw_items();
    std::vector<int64_t> first_token(items.size());
    int64_t tokens = 0;
    for (size_t k = 0; k < items.size(); ++k) {
      first_token[k] = tokens;
      tokens += items[k].span;
    }
    const int64_t rows = tokens * layers * heads;
    const int64_t count = draw(0, 2 * rows);
    RowSampler sampler(static_cast<uint64_t>(i), layers, heads);
    const std::vector<RowSample> samples = sampler.choose(items, count);
    ASSERT_EQ(static_cast<int64_t>(samples.size()), std::min(count, rows));
    std::set<Row> seen;
    for (const RowSample& sample : samples) {
      const auto k = static_cast<size_t>(sample.item.request);
      ASSERT_EQ(sample.item, items[k]);
      ASSERT_EQ(sample.position - items[k].begin, sample.token - first_token[k]);
      ASSERT_GE(sample.token, first_token[k]);
      ASSERT_LT(sample.token, first_token[k] + items[k].span);
      ASSERT_TRUE(0 <= sample.layer && sample.layer < layers);
      ASSERT_TRUE(0 <= sample.head && sample.head < heads);
      ASSERT_TRUE(seen.insert({sample.token, sample.layer, sample.head}).second);
    }
  }
}

TEST_F(RowSamplerProperty, RequestsHaveAPartAlikeAsLongAsTheyHaveRows) {
  for (int i = 0; i < 300; ++i) {
    SCOPED_TRACE(i);
    const std::vector<StepItem> items = draw_items();
    RowSampler sampler(static_cast<uint64_t>(i), 2, 3);
    std::map<int64_t, int64_t> taken;
    for (const RowSample& sample : sampler.choose(items, draw(0, 100)))
      ++taken[sample.item.request];
    int64_t most = 0;
    for (const StepItem& item : items) most = std::max(most, taken[item.request]);
    for (const StepItem& item : items) {
      ASSERT_GE(taken[item.request], std::min<int64_t>(most - 1, 6 * item.span));
    }
  }
}

TEST_F(RowSamplerProperty, RequestsThatGaveNoRowComeFirst) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    RowSampler sampler(seed, 2, 3);
    std::vector<StepItem> items;
    std::set<int64_t> seen;
    for (int64_t step = 0; step < 20; ++step) {
      if (step < 10) {
        items.push_back({.request = 2 * step, .span = 1});
        items.push_back({.request = 2 * step + 1, .span = 90});
      }
      for (const RowSample& sample : sampler.choose(items, 1)) seen.insert(sample.item.request);
    }
    EXPECT_EQ(seen.size(), 20U) << "one a step";
  }
}

// 5 tokens, 2 layers, 3 heads: 30 rows, of which the one request gives two of four samples a step.
TEST_F(RowSamplerProperty, EveryRowIsSeenInTheEndAboutAsOftenAsTheOthersOfItsRequest) {
  constexpr int kSteps = 6000;
  const std::vector<StepItem> items = {{.request = 0, .begin = 9, .span = 1},
                                       {.request = 1, .begin = 0, .span = 4}};
  RowSampler sampler(7, 2, 3);
  std::map<Row, int> counts;
  for (int i = 0; i < kSteps; ++i) {
    for (const RowSample& sample : sampler.choose(items, 4)) {
      ++counts[{sample.token, sample.layer, sample.head}];
    }
  }
  ASSERT_EQ(counts.size(), 30U);
  for (const auto& [row, count] : counts) {
    const double rows_of_request = std::get<0>(row) == 0 ? 6 : 24;
    const double expected = 2 * kSteps / rows_of_request;
    EXPECT_NEAR(count, expected, 0.2 * expected);
  }
}

TEST_F(RowSamplerProperty, StepsAreSampledApartAndASeedRepeatsThem) {
  const std::vector<StepItem> items = {{.request = 0, .begin = 0, .span = 1000}};
  RowSampler first(3, 2, 16);
  RowSampler again(3, 2, 16);
  RowSampler other(4, 2, 16);
  const auto samples = first.choose(items, 5);
  EXPECT_EQ(again.choose(items, 5), samples);
  EXPECT_NE(other.choose(items, 5), samples);
  EXPECT_NE(first.choose(items, 5), samples) << "the next step";
}

}  // namespace
}  // namespace mla::cli
