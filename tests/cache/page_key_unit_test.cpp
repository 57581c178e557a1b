#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "mla/page_key.hpp"

namespace mla {
namespace {

PageKey key_of(PageKey previous, std::vector<uint64_t> ids) { return chain_key(previous, ids); }

TEST(PageKeyUnit, EqualPrefixesHaveEqualKeys) {
  EXPECT_EQ(key_of(key_of({}, {1, 2}), {3}), key_of(key_of({}, {1, 2}), {3}));
}

TEST(PageKeyUnit, OrderCountAndPrefixArePartOfTheKey) {
  EXPECT_NE(key_of({}, {1, 2}), key_of({}, {2, 1}));
  EXPECT_NE(key_of({}, {1}), key_of({}, {1, 0}));
  EXPECT_NE(key_of({}, {}), PageKey{});
  EXPECT_NE(key_of(key_of({}, {1}), {2}), key_of({}, {1, 2}));
  EXPECT_NE(key_of(key_of({}, {1}), {3}), key_of(key_of({}, {2}), {3}));
}

// Small ids in long chains, as traces have them: not even one of the two halves collides.
TEST(PageKeyUnit, SmallIdsDoNotCollide) {
  std::set<uint64_t> high;
  std::set<uint64_t> low;
  size_t num_keys = 0;
  for (uint64_t start = 0; start < 100; ++start) {
    PageKey key;
    for (uint64_t i = 0; i < 1000; ++i) {
      key = key_of(key, {start + i});
      high.insert(key.high);
      low.insert(key.low);
      ++num_keys;
    }
  }
  EXPECT_EQ(high.size(), num_keys);
  EXPECT_EQ(low.size(), num_keys);
}

}  // namespace
}  // namespace mla
