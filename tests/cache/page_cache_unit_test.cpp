#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "cache/page_cache.hpp"
#include "mla/error.hpp"

namespace mla::cache {
namespace {

constexpr PageKey key(uint64_t number) { return {.high = number, .low = number}; }

// A prefix of `count` pages with keys first, first + 1, ..; held once.
std::vector<int32_t> make_prefix(PageCache& pages, uint64_t first, int count) {
  std::vector<int32_t> prefix;
  for (int i = 0; i < count; ++i) {
    prefix.push_back(pages.take());
    EXPECT_TRUE(pages.enter(key(first + i), i == 0 ? kNoPage : prefix[i - 1], prefix[i]));
  }
  return prefix;
}

TEST(PageAllocatorUnit, HandsOutEachPageOnceAndTakesFreedOnesBackAtOnce) {
  PageAllocator pages(3);
  const std::set<int32_t> all{pages.take(), pages.take(), pages.take()};
  EXPECT_EQ(all, (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(pages.num_free(), 0);
  pages.hold(1);
  EXPECT_EQ(pages.drop(1), 1);
  EXPECT_EQ(pages.num_free(), 0);
  EXPECT_EQ(pages.drop(1), 0);
  EXPECT_EQ(pages.take(), 1);
}

TEST(PageCacheUnit, DroppedPrefixesAreEvictedOldestFirstAndFromTheirEnd) {
  PageCache pages(4);
  const auto a = make_prefix(pages, 10, 2);
  const auto b = make_prefix(pages, 20, 2);
  pages.drop_backwards(b);
  pages.drop_backwards(a);
  EXPECT_EQ(pages.num_free(), 0);
  EXPECT_EQ(pages.num_cached(), 4);
  EXPECT_EQ(pages.take(), b[1]);
  EXPECT_EQ(pages.take(), b[0]);
  EXPECT_EQ(pages.take(), a[1]);
  EXPECT_EQ(pages.find(key(10), kNoPage), a[0]);
  EXPECT_EQ(pages.find(key(11), a[0]), kNoPage);
}

TEST(PageCacheUnit, HeldPagesAreNotEvicted) {
  PageCache pages(3);
  const auto a = make_prefix(pages, 10, 2);
  pages.drop_backwards(a);
  pages.hold(a[0]);
  EXPECT_EQ(pages.num_available(), 2);
  EXPECT_EQ(pages.take(), 2);
  EXPECT_EQ(pages.take(), a[1]);
  EXPECT_EQ(pages.num_available(), 0);
}

TEST(PageCacheUnit, FreePagesAreTakenBeforeCachedOnes) {
  PageCache pages(3);
  pages.drop_backwards(make_prefix(pages, 10, 1));
  pages.take();
  pages.take();
  EXPECT_EQ(pages.num_cached(), 1);
}

TEST(PageCacheUnit, AKeyBelowAnotherPageIsNotFoundNorEntered) {
  PageCache pages(4);
  const auto a = make_prefix(pages, 10, 2);
  const int32_t other = pages.take();
  EXPECT_EQ(pages.find(key(11), kNoPage), kNoPage);
  EXPECT_FALSE(pages.enter(key(11), kNoPage, other));
  EXPECT_EQ(pages.find(key(11), a[0]), a[1]);
}

TEST(PageCacheUnit, ForgettingAllFreesWhatNobodyHolds) {
  PageCache pages(4);
  const auto a = make_prefix(pages, 10, 3);
  pages.drop_backwards({a.begin() + 1, a.end()});
  pages.forget_all();
  EXPECT_EQ(pages.num_free(), 3);
  EXPECT_EQ(pages.num_cached(), 0);
  EXPECT_EQ(pages.refs(a[0]), 1);
  EXPECT_EQ(pages.find(key(10), kNoPage), kNoPage);
}

TEST(PageCacheUnit, TheCheckSeesAMissingAndAForeignHolder) {
  PageCache pages(3);
  const auto a = make_prefix(pages, 10, 1);
  const int32_t owned = pages.take();
  std::vector<int32_t> holders(3, 0);
  holders[a[0]] = 1;
  EXPECT_THROW(pages.check(holders), InvalidState) << "a page that nobody holds is leaked";
  holders[owned] = 1;
  EXPECT_NO_THROW(pages.check(holders));
  holders[2] = 1;
  EXPECT_THROW(pages.check(holders), InvalidState) << "a free page is in use";
}

TEST(PageCacheUnit, TheCheckSeesAWrongOrderOfEviction) {
  PageCache pages(2);
  const auto a = make_prefix(pages, 10, 2);
  pages.drop(a[0]);  // against the rule: the first page before the second
  pages.drop(a[1]);
  EXPECT_THROW(pages.check(std::vector<int32_t>(2, 0)), InvalidState);
}

}  // namespace
}  // namespace mla::cache
