#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/kv_rows.hpp"
#include "mla/error.hpp"
#include "mla/kv_resource.hpp"

namespace mla::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<Token> count_from(Token first, int64_t count) {
  std::vector<Token> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// A pool of `num_pages` pages of `page_size` tokens and its resource, checked after every call.
struct Cache {
  LatentPool pool;
  KvResource kv;

  Cache(int64_t num_pages, int32_t page_size)
      : pool(small_pool(num_pages, page_size)), kv(pool, {.check_every_call = true}) {}

  // One whole step over one stream.
  void append(const KvStream& stream, std::span<const Token> tokens) {
    const Segment step[] = {{stream.request, stream.label, static_cast<int32_t>(tokens.size())}};
    ASSERT_TRUE(kv.admit(step));
    kv.plan();
    write_tokens(kv, stream.label, tokens);
    kv.commit();
  }
  std::vector<Token> stored(const KvStream& stream, int32_t layer = 1) const {
    return read_tokens(pool, kv.pages(stream), kv.length(stream), layer);
  }
  std::vector<int32_t> pages(const KvStream& stream) const {
    const auto held = kv.pages(stream);
    return {held.begin(), held.end()};
  }
  PageCounts counts() const { return kv.check(); }
};

// Calls fn, which must throw Thrown about `what`.
template <class Thrown, class Fn>
void expect_refusal(const std::string& what, const Fn& fn) {
  try {
    fn();
    ADD_FAILURE() << what << " was accepted";
  } catch (const Thrown& error) {
    EXPECT_EQ(error.parts().what, what) << error.what();
    EXPECT_FALSE(error.parts().where.empty() || error.parts().expected.empty() ||
                 error.parts().got.empty())
        << error.what();
  }
}

TEST(KvResourceUnit, APlanListsLengthsPagesAndSlots) {
  Cache cache(8, 4);
  cache.kv.open({.request = 1});
  cache.kv.open({.request = 2});
  cache.append({.request = 1}, count_from(10, 3));
  const Segment step[] = {
      {.request = 2, .span = 5}, {.request = 1, .span = 2}, {.request = 3, .span = 0}};
  cache.kv.open({.request = 3});
  ASSERT_TRUE(cache.kv.admit(step));
  const auto plans = cache.kv.plan();
  ASSERT_EQ(plans.size(), 1U);
  const LabelPlan& plan = plans[0];
  EXPECT_EQ(plan.label, "main");
  EXPECT_THAT(plan.qo_indptr, ElementsAre(0, 5, 7, 7));
  EXPECT_THAT(plan.kv_indptr, ElementsAre(0, 2, 4, 4));
  EXPECT_THAT(plan.kv_len, ElementsAre(5, 5, 0));
  EXPECT_THAT(plan.kv_last_page_len, ElementsAre(1, 1, 0));
  const auto one = cache.pages({.request = 1});
  const auto two = cache.pages({.request = 2});
  EXPECT_THAT(plan.kv_indices, ElementsAre(two[0], two[1], one[0], one[1]));
  EXPECT_THAT(plan.slots, ElementsAre(two[0] * 4, two[0] * 4 + 1, two[0] * 4 + 2, two[0] * 4 + 3,
                                      two[1] * 4, one[0] * 4 + 3, one[1] * 4));
  EXPECT_EQ(plan.views[1].request, 1U);
  EXPECT_EQ(plan.views[1].start, 3);
  EXPECT_EQ(plan.views[1].to_compute, 2);
  EXPECT_EQ(plan.views[1].length, 5);
  EXPECT_THAT(plan.views[1].pages, ElementsAre(one[0], one[1]));
  EXPECT_EQ(plan.batch().kv_len.data(), plan.kv_len.data());
}

TEST(KvResourceUnit, LabelsArePackedOneAfterTheOther) {
  Cache cache(8, 4);
  for (const RequestId request : {1, 2}) {
    cache.kv.open({request, "draft"});
    cache.kv.open({request, "main"});
  }
  const Segment step[] = {{1, "draft", 1}, {1, "main", 2}, {2, "main", 3}, {2, "draft", 4}};
  ASSERT_TRUE(cache.kv.admit(step));
  const auto plans = cache.kv.plan();
  ASSERT_EQ(plans.size(), 2U);
  EXPECT_EQ(plans[0].label, "draft");
  EXPECT_THAT(plans[0].qo_indptr, ElementsAre(0, 1, 5));
  EXPECT_EQ(plans[0].views[1].request, 2U);
  EXPECT_EQ(plans[0].views[1].label, "draft");
  EXPECT_THAT(plans[1].qo_indptr, ElementsAre(0, 2, 5));
  EXPECT_THAT(plans[1].kv_indptr, ElementsAre(0, 1, 2));
  EXPECT_EQ(&cache.kv.label_plan("main"), &plans[1]);
  write_tokens(cache.kv, "draft", count_from(100, 5));
  write_tokens(cache.kv, "main", count_from(200, 5));
  cache.kv.commit();
  EXPECT_EQ(cache.stored({2, "draft"}), count_from(101, 4));
  EXPECT_EQ(cache.stored({1, "main"}), count_from(200, 2));
}

TEST(KvResourceUnit, APoolHasOneResourceAtATime) {
  LatentPool pool(small_pool(8, 4));
  LatentPool other(small_pool(8, 4));
  KvResource on_other(other);
  {
    KvResource first(pool);
    expect_refusal<InvalidState>("pool", [&] { KvResource second(pool); });
    KvResource moved = std::move(first);
    expect_refusal<InvalidState>("pool", [&] { KvResource second(pool); });
    moved.open({.request = 1}, 4);
  }
  KvResource after(pool);
  EXPECT_EQ(after.free_pages(), 8);
  on_other = std::move(after);
  KvResource again(other);
  expect_refusal<InvalidState>("pool", [&] { KvResource second(pool); });
}

TEST(KvResourceUnit, AnEmptyStepIsAStep) {
  Cache cache(2, 4);
  ASSERT_TRUE(cache.kv.admit(std::span<const Segment>{}));
  EXPECT_THAT(cache.kv.plan(), IsEmpty());
  cache.kv.commit();
}

TEST(KvResourceUnit, SpanZeroReadsWithoutExtending) {
  Cache cache(2, 4);
  cache.kv.open({.request = 1});
  cache.append({.request = 1}, count_from(10, 4));
  const Segment step[] = {{.request = 1, .span = 0}};
  ASSERT_TRUE(cache.kv.admit(step));
  cache.kv.plan();
  EXPECT_THAT(cache.kv.label_plan().kv_len, ElementsAre(4));
  EXPECT_THAT(cache.kv.label_plan().slots, IsEmpty());
  cache.kv.commit();
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 1, .owned = 1}));
}

// A step that the pool cannot hold is refused whole, with the pages short for each segment.
TEST(KvResourceUnit, ARefusedStepNamesWhoIsShortAndChangesNothing) {
  Cache cache(5, 4);
  for (const RequestId request : {1, 2, 3}) cache.kv.open({.request = request});
  cache.append({.request = 1}, count_from(10, 7));
  const auto before = cache.counts();
  const auto pages_before = cache.pages({.request = 1});
  const Segment step[] = {
      {.request = 1, .span = 6}, {.request = 2, .span = 9}, {.request = 3, .span = 1}};
  const AdmitResult result = cache.kv.admit(step);
  EXPECT_FALSE(result);
  EXPECT_EQ(result.pages_short, 3) << "needs 2 + 3 + 1, has 3";
  ASSERT_EQ(result.shortages.size(), 2U);
  EXPECT_EQ(result.shortages[0].request, 2U);
  EXPECT_EQ(result.shortages[0].label, "main");
  EXPECT_EQ(result.shortages[0].pages, 2);
  EXPECT_EQ(result.shortages[1].request, 3U);
  EXPECT_EQ(result.shortages[1].pages, 1);
  EXPECT_EQ(cache.counts(), before);
  EXPECT_EQ(cache.pages({.request = 1}), pages_before);
  EXPECT_EQ(cache.stored({.request = 1}), count_from(10, 7));
  EXPECT_THROW(cache.kv.plan(), InvalidState);
  const Segment smaller[] = {{.request = 1, .span = 6}, {.request = 3, .span = 1}};
  EXPECT_TRUE(cache.kv.admit(smaller));
}

TEST(KvResourceUnit, AdmittingTheSameStepAgainReservesNothing) {
  Cache cache(5, 4);
  cache.kv.open({.request = 1});
  const Segment step[] = {{.request = 1, .span = 6}};
  ASSERT_TRUE(cache.kv.admit(step));
  const auto reserved = cache.counts();
  EXPECT_EQ(reserved, (PageCounts{.free = 3, .reserved = 2}));
  EXPECT_TRUE(cache.kv.admit(step));
  EXPECT_EQ(cache.counts(), reserved);
  const Segment other[] = {{.request = 1, .span = 7}};
  EXPECT_THROW(cache.kv.admit(other), InvalidState);
  EXPECT_EQ(cache.counts(), reserved);
}

TEST(KvResourceUnit, AnAbandonedStepGivesItsPagesBack) {
  Cache cache(5, 4);
  cache.kv.open({.request = 1});
  cache.append({.request = 1}, count_from(10, 2));
  const auto before = cache.counts();
  const Segment step[] = {{.request = 1, .span = 9}};
  ASSERT_TRUE(cache.kv.admit(step));
  cache.kv.abandon();
  EXPECT_EQ(cache.counts(), before);
  ASSERT_TRUE(cache.kv.admit(step));
  cache.kv.plan();
  write_tokens(cache.kv, "main", count_from(50, 9));
  cache.kv.abandon();
  EXPECT_EQ(cache.counts(), before);
  EXPECT_EQ(cache.stored({.request = 1}), count_from(10, 2));
}

// mstar-project/mstar PRs 264 and 271: drafted rows must be taken back.
TEST(KvResourceUnit, RewoundSlotsAreFreeAndFilledAgain) {
  Cache cache(2, 2);
  cache.kv.open({.request = 1});
  cache.append({.request = 1}, count_from(10, 4));
  cache.kv.trim({.request = 1}, 2);
  EXPECT_EQ(cache.kv.free_pages(), 1);
  cache.append({.request = 1}, count_from(90, 1));
  EXPECT_EQ(cache.stored({.request = 1}), (std::vector<Token>{10, 11, 90}));
  EXPECT_EQ(cache.counts(), (PageCounts{.owned = 2}));
}

// sgl-project/sglang PR 9990: each mode built its own indices, and each was wrong for pages of
// more than one token.
TEST(KvResourceUnit, PrefillDecodeVerifyAndRewindHaveTheIndicesOfOnePlainList) {
  Cache cache(4, 16);
  cache.kv.open({.request = 1});
  int64_t length = 0;
  const auto step = [&](int32_t span) {
    const Segment segments[] = {{.request = 1, .span = span}};
    ASSERT_TRUE(cache.kv.admit(segments));
    cache.kv.plan();
    const LabelPlan& plan = cache.kv.label_plan();
    const auto pages = cache.pages({.request = 1});
    EXPECT_THAT(plan.kv_indices, ::testing::ElementsAreArray(pages));
    EXPECT_THAT(plan.kv_len, ElementsAre(length + span));
    EXPECT_EQ(pages.size(), static_cast<size_t>((length + span + 15) / 16));
    for (int32_t i = 0; i < span; ++i) {
      EXPECT_EQ(plan.slots[i], int64_t{pages[(length + i) / 16]} * 16 + (length + i) % 16);
    }
    write_tokens(cache.kv, "main", count_from(static_cast<Token>(length), span));
    cache.kv.commit();
    length += span;
  };
  step(20);  // prefill
  step(1);   // decode
  step(4);   // verify
  cache.kv.trim({.request = 1}, 3);
  length -= 3;
  step(1);
  step(11);                          // over a page boundary
  cache.kv.trim({.request = 1}, 3);  // and back over it
  length -= 3;
  EXPECT_EQ(cache.pages({.request = 1}).size(), 2U);
  EXPECT_EQ(cache.stored({.request = 1}), count_from(0, length));
}

TEST(KvResourceUnit, RemovedPagesMayBeHandedOutAtOnce) {
  Cache cache(2, 4);
  cache.kv.open({1, "main"});
  cache.kv.open({1, "draft"});
  cache.kv.open({2, "main"});
  cache.append({1, "main"}, count_from(10, 4));
  cache.append({1, "draft"}, count_from(20, 1));
  cache.kv.remove(1);
  EXPECT_FALSE(cache.kv.contains({1, "main"}));
  EXPECT_FALSE(cache.kv.contains({1, "draft"}));
  EXPECT_EQ(cache.kv.free_pages(), 2);
  cache.append({2, "main"}, count_from(30, 8));
  EXPECT_EQ(cache.stored({2, "main"}), count_from(30, 8));
}

TEST(KvResourceUnit, AForkSharesUntilOneOfTheTwoAppends) {
  Cache cache(6, 4);
  cache.kv.open({.request = 1});
  cache.append({.request = 1}, count_from(10, 6));
  cache.kv.fork({.request = 1}, {.request = 2});
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 4, .shared = 2}));
  EXPECT_EQ(cache.pages({.request = 2}), cache.pages({.request = 1}));
  cache.append({.request = 2}, count_from(50, 1));
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 3, .owned = 2, .shared = 1}));
  cache.append({.request = 1}, count_from(70, 2));
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 3, .owned = 2, .shared = 1}))
      << "the last holder appends in place";
  EXPECT_EQ(cache.stored({.request = 1}), (std::vector<Token>{10, 11, 12, 13, 14, 15, 70, 71}));
  EXPECT_EQ(cache.stored({.request = 2}), (std::vector<Token>{10, 11, 12, 13, 14, 15, 50}));
  EXPECT_EQ(cache.stored({.request = 2}, 0), (std::vector<Token>{10, 11, 12, 13, 14, 15, 50}));
}

TEST(KvResourceUnit, ForksThatAppendInOneStepLeaveTheirPageToTheLastOne) {
  Cache cache(3, 4);
  cache.kv.open({.request = 1});
  cache.append({.request = 1}, count_from(10, 2));
  cache.kv.fork({.request = 1}, {.request = 2});
  cache.kv.fork({.request = 1}, {1, "draft"});
  const Segment step[] = {{1, "main", 1}, {2, "main", 1}, {1, "draft", 1}};
  ASSERT_TRUE(cache.kv.admit(step)) << "two copies fit in two pages";
  cache.kv.plan();
  write_tokens(cache.kv, "main", std::vector<Token>{50, 60});
  write_tokens(cache.kv, "draft", std::vector<Token>{70});
  cache.kv.commit();
  EXPECT_EQ(cache.counts(), (PageCounts{.owned = 3}));
  EXPECT_EQ(cache.stored({1, "main"}), (std::vector<Token>{10, 11, 50}));
  EXPECT_EQ(cache.stored({2, "main"}), (std::vector<Token>{10, 11, 60}));
  EXPECT_EQ(cache.stored({1, "draft"}), (std::vector<Token>{10, 11, 70}));
}

TEST(KvResourceUnit, ACopyCountsInTheShortage) {
  Cache cache(1, 4);
  cache.kv.open({.request = 1});
  cache.append({.request = 1}, count_from(10, 2));
  cache.kv.fork({.request = 1}, {1, "draft"});
  const Segment step[] = {{1, "draft", 1}};
  const AdmitResult result = cache.kv.admit(step);
  EXPECT_EQ(result.pages_short, 1);
  ASSERT_EQ(result.shortages.size(), 1U);
  EXPECT_EQ(result.shortages[0].label, "draft");
}

TEST(KvResourceUnit, AnAbandonedCopyBeforePlanIsGivenBack) {
  Cache cache(3, 4);
  cache.kv.open({.request = 1});
  cache.append({.request = 1}, count_from(10, 2));
  cache.kv.fork({.request = 1}, {.request = 2});
  const auto before = cache.counts();
  const Segment step[] = {{.request = 2, .span = 1}};
  ASSERT_TRUE(cache.kv.admit(step));
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 1, .shared = 1, .reserved = 1}));
  cache.kv.abandon();
  EXPECT_EQ(cache.counts(), before);
}

TEST(KvResourceUnit, TrimIntoASharedPageKeepsTheOthersRows) {
  Cache cache(4, 4);
  cache.kv.open({.request = 1});
  cache.append({.request = 1}, count_from(10, 8));
  cache.kv.fork({.request = 1}, {.request = 2});
  cache.kv.trim({.request = 2}, 6);
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 2, .owned = 1, .shared = 1}));
  cache.append({.request = 2}, count_from(90, 1));
  EXPECT_EQ(cache.stored({.request = 1}), count_from(10, 8));
  EXPECT_EQ(cache.stored({.request = 2}), (std::vector<Token>{10, 11, 90}));
}

TEST(KvResourcePrefixUnit, AKnownPrefixIsAttachedAndSharesPages) {
  Cache cache(8, 4);
  const auto prompt = count_from(10, 11);
  EXPECT_EQ(cache.kv.open({.request = 1}, 11, keys_of(prompt, 4)), 0);
  cache.append({.request = 1}, prompt);
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 5, .owned = 1, .shared = 2}));
  EXPECT_EQ(cache.kv.open({.request = 2}, 11, keys_of(prompt, 4)), 8);
  EXPECT_EQ(cache.stored({.request = 2}), count_from(10, 8));
  const auto one = cache.pages({.request = 1});
  EXPECT_EQ(cache.pages({.request = 2}), std::vector<int32_t>(one.begin(), one.begin() + 2));
}

TEST(KvResourcePrefixUnit, APrefixOutlivesItsRequest) {
  Cache cache(8, 4);
  const auto prompt = count_from(10, 9);
  cache.kv.open({.request = 1}, 9, keys_of(prompt, 4));
  cache.append({.request = 1}, prompt);
  cache.kv.remove(1);
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 6, .cached = 2}));
  auto longer = prompt;
  longer.push_back(99);
  EXPECT_EQ(cache.kv.open({.request = 2}, 10, keys_of(longer, 4)), 8);
  auto differing = prompt;
  differing[5] = 99;
  EXPECT_EQ(cache.kv.open({.request = 3}, 9, keys_of(differing, 4)), 4);
  cache.kv.remove(2);
  cache.kv.remove(3);
  cache.kv.drop_prefixes();
  EXPECT_EQ(cache.kv.free_pages(), 8) << "leaked pages";
}

TEST(KvResourcePrefixUnit, APromptKnownToItsEndComputesItsLastRow) {
  Cache cache(8, 4);
  const auto prompt = count_from(10, 8);
  cache.kv.open({.request = 1}, 8, keys_of(prompt, 4));
  cache.append({.request = 1}, prompt);
  EXPECT_EQ(cache.kv.open({.request = 2}, 8, keys_of(prompt, 4)), 7);
  const Segment step[] = {{.request = 2, .span = 1}};
  ASSERT_TRUE(cache.kv.admit(step));
  cache.kv.plan();
  EXPECT_NE(cache.pages({.request = 2})[1], cache.pages({.request = 1})[1]) << "no copy was made";
  write_tokens(cache.kv, "main", count_from(17, 1));
  cache.kv.commit();
  EXPECT_EQ(cache.pages({.request = 2}), cache.pages({.request = 1}))
      << "the known page takes the copy's place";
  EXPECT_EQ(cache.stored({.request = 2}), prompt);
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 6, .shared = 2}));
}

TEST(KvResourcePrefixUnit, APromptKnownToItsEndNeedsNoPageMoreThanItsOwn) {
  Cache cache(2, 4);
  const auto prompt = count_from(10, 8);
  cache.kv.open({.request = 1}, 8, keys_of(prompt, 4));
  cache.append({.request = 1}, prompt);
  cache.kv.remove(1);
  EXPECT_EQ(cache.kv.open({.request = 2}, 8, keys_of(prompt, 4)), 7);
  cache.append({.request = 2}, count_from(17, 1));  // there is no room for a copy
  EXPECT_EQ(cache.stored({.request = 2}), prompt);
  cache.kv.remove(2);
  EXPECT_EQ(cache.counts(), (PageCounts{.cached = 2})) << "the page is known again";
}

TEST(KvResourcePrefixUnit, EqualPagesComputedSideBySideBecomeOne) {
  Cache cache(8, 4);
  const auto prompt = count_from(10, 9);
  for (const RequestId request : {1, 2}) cache.kv.open({request}, 9, keys_of(prompt, 4));
  cache.append({.request = 1}, prompt);
  cache.append({.request = 2}, prompt);
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 4, .owned = 2, .shared = 2}));
  EXPECT_EQ(cache.stored({.request = 2}), prompt);
}

TEST(KvResourcePrefixUnit, KeysOfGeneratedPagesMayComeLater) {
  Cache cache(8, 4);
  const auto tokens = count_from(10, 8);
  const auto keys = keys_of(tokens, 4);
  cache.kv.open({.request = 1}, 4, std::span(keys).first(1));
  cache.append({.request = 1}, tokens);
  cache.kv.add_page_keys({.request = 1}, std::span(keys).subspan(1));
  cache.append({.request = 1}, count_from(18, 1));
  EXPECT_EQ(cache.kv.open({.request = 2}, 9, keys), 8);
}

TEST(KvResourcePrefixUnit, LabelsDoNotShareByKey) {
  Cache cache(8, 4);
  const auto prompt = count_from(10, 9);
  cache.kv.open({1, "main"}, 9, keys_of(prompt, 4));
  cache.append({1, "main"}, prompt);
  EXPECT_EQ(cache.kv.open({2, "draft"}, 9, keys_of(prompt, 4)), 0);
}

TEST(KvResourcePrefixUnit, TrimForgetsTheKeysOfCutPages) {
  Cache cache(8, 4);
  const auto prompt = count_from(10, 8);
  cache.kv.open({.request = 1}, 8, keys_of(prompt, 4));
  cache.append({.request = 1}, prompt);
  cache.kv.trim({.request = 1}, 2);
  cache.append({.request = 1}, std::vector<Token>{90, 91, 92});  // other rows than the key says
  EXPECT_EQ(cache.kv.open({.request = 2}, 9, keys_of(prompt, 4)), 8);
  EXPECT_EQ(cache.stored({.request = 2}), prompt);
  EXPECT_EQ(cache.stored({.request = 1}), (std::vector<Token>{10, 11, 12, 13, 14, 15, 90, 91, 92}));
}

TEST(KvResourcePrefixUnit, OnlyAsManyCachedPagesAsNeededAreEvictedOldestFirst) {
  Cache cache(6, 4);
  const auto old_prompt = count_from(10, 8);
  const auto new_prompt = count_from(50, 8);
  cache.kv.open({.request = 1}, 8, keys_of(old_prompt, 4));
  cache.append({.request = 1}, old_prompt);
  cache.kv.open({.request = 2}, 8, keys_of(new_prompt, 4));
  cache.append({.request = 2}, new_prompt);
  cache.kv.remove(1);
  cache.kv.remove(2);
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 2, .cached = 4}));
  cache.kv.open({.request = 3});
  cache.append({.request = 3}, count_from(90, 12));
  EXPECT_EQ(cache.counts(), (PageCounts{.owned = 3, .cached = 3}));
  EXPECT_EQ(cache.kv.open({.request = 4}, 8, keys_of(old_prompt, 4)), 4)
      << "the end of the older prefix was to go first";
  EXPECT_EQ(cache.kv.open({.request = 5}, 9, keys_of(new_prompt, 4)), 8);
}

TEST(KvResourcePrefixUnit, DroppedPrefixesOfLiveStreamsComeBackWithTheirNextRows) {
  Cache cache(8, 4);
  const auto prompt = count_from(10, 8);
  cache.kv.open({.request = 1}, 8, keys_of(prompt, 4));
  cache.append({.request = 1}, prompt);
  cache.kv.drop_prefixes();
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 6, .owned = 2}));
  cache.append({.request = 1}, count_from(18, 1));
  EXPECT_EQ(cache.kv.open({.request = 2}, 9, keys_of(prompt, 4)), 8);
}

// A page that a fork holds too is not given up for the known one: the fork holds the pages behind
// it, and these would be indexed behind a page that it does not hold.
TEST(KvResourcePrefixUnit, AForkedPageIsNotReplacedByTheKnownOne) {
  Cache cache(8, 2);
  const auto tokens = count_from(10, 4);
  const auto keys = keys_of(tokens, 2);
  cache.kv.open({.request = 1});
  cache.append({.request = 1}, tokens);
  cache.kv.open({.request = 2}, 2, keys);
  cache.append({.request = 2}, count_from(10, 2));
  cache.kv.fork({.request = 1}, {.request = 3});
  cache.kv.add_page_keys({.request = 1}, keys);
  cache.append({.request = 1}, count_from(14, 1));
  EXPECT_EQ(cache.pages({.request = 1})[0], cache.pages({.request = 3})[0]);
  cache.kv.remove(1);
  cache.kv.remove(2);
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 5, .owned = 2, .cached = 1}));
  EXPECT_EQ(cache.stored({.request = 3}), tokens);
}

// Two pages with one key break the caller's promise; nothing may break with it.
TEST(KvResourcePrefixUnit, CollidingKeysShareNothing) {
  Cache cache(8, 2);
  const std::vector<PageKey> keys(3, PageKey{.high = 5, .low = 5});
  cache.kv.open({.request = 1}, 6, keys);
  cache.append({.request = 1}, count_from(10, 6));
  EXPECT_EQ(cache.kv.open({.request = 2}, 6, keys), 2);
  cache.append({.request = 2}, count_from(50, 4));
  EXPECT_EQ(cache.stored({.request = 1}), count_from(10, 6));
  EXPECT_EQ(cache.stored({.request = 2}), (std::vector<Token>{10, 11, 50, 51, 52, 53}));
}

TEST(KvResourceUnit, ThousandsOfPagesPastFourGigaElementsAreAddressedIn64Bits) {
  LatentPool pool({.num_layers = 1,
                   .num_pages = 233'101,
                   .page_size = 32,
                   .kv_lora_rank = 512,
                   .qk_rope_head_dim = 64});
  KvResource kv(pool);
  kv.open({.request = 1});
  kv.open({.request = 2});
  const Segment step[] = {{.request = 1, .span = 233'100 * 32}, {.request = 2, .span = 1}};
  ASSERT_TRUE(kv.admit(step));
  kv.plan();
  EXPECT_EQ(kv.label_plan().slots.back(), int64_t{233'100} * 32);
  EXPECT_GT(kv.label_plan().slots.back() * 576, int64_t{1} << 32);
  EXPECT_EQ(kv.label_plan().kv_len[0], 233'100 * 32);
}

TEST(KvResourceUnit, CallsOutOfOrderAreRefused) {
  Cache cache(4, 4);
  cache.kv.open({.request = 1});
  const Segment step[] = {{.request = 1, .span = 1}};
  const auto write = [&] { write_tokens(cache.kv, "main", count_from(0, 1)); };
  expect_refusal<InvalidState>("step", [&] { cache.kv.plan(); });
  expect_refusal<InvalidState>("step", [&] { cache.kv.commit(); });
  expect_refusal<InvalidState>("step", [&] { cache.kv.abandon(); });
  expect_refusal<InvalidState>("step", [&] { cache.kv.label_plan(); });
  expect_refusal<InvalidState>("step", write);
  ASSERT_TRUE(cache.kv.admit(step));
  expect_refusal<InvalidState>("step", [&] { cache.kv.commit(); });
  expect_refusal<InvalidState>("step", write);
  for (int planned = 0; planned < 2; ++planned) {
    expect_refusal<InvalidState>("stream", [&] { cache.kv.trim({.request = 1}, 0); });
    expect_refusal<InvalidState>("stream", [&] { cache.kv.remove(1); });
    expect_refusal<InvalidState>("stream", [&] { cache.kv.fork({.request = 1}, {.request = 2}); });
    if (planned == 0) cache.kv.plan();
  }
  expect_refusal<InvalidState>("step", [&] { cache.kv.admit(step); });
  expect_refusal<InvalidState>("step", [&] { cache.kv.plan(); });
  EXPECT_EQ(cache.counts(), (PageCounts{.free = 3, .reserved = 1}));
  write();
  cache.kv.commit();
  EXPECT_EQ(cache.stored({.request = 1}), count_from(0, 1));
}

TEST(KvResourceUnit, BadArgumentsAreRefusedByName) {
  Cache cache(4, 4);
  cache.kv.open({.request = 1});
  cache.append({.request = 1}, count_from(10, 3));
  const auto before = cache.counts();
  const KvStream unknown{.request = 9};
  using Steps = std::vector<Segment>;
  const auto admit = [&](const Steps& step) { return [&cache, step] { cache.kv.admit(step); }; };

  expect_refusal<InvalidArgument>("stream", [&] { cache.kv.open({.request = 1}); });
  expect_refusal<InvalidArgument>("num_tokens", [&] { cache.kv.open({.request = 2}, -1); });
  expect_refusal<InvalidArgument>("stream", [&] { cache.kv.add_page_keys(unknown, {}); });
  expect_refusal<InvalidArgument>("stream", [&] { cache.kv.fork(unknown, {.request = 2}); });
  expect_refusal<InvalidArgument>("target", [&] { cache.kv.fork({1}, {1}); });
  expect_refusal<InvalidArgument>("segments[1]", admit({{.request = 1}, {.request = 9}}));
  expect_refusal<InvalidArgument>("segments[0]", admit({{1, "draft", 1}}));
  expect_refusal<InvalidArgument>("segments[1]", admit({{1, "main", 1}, {1, "main", 1}}));
  expect_refusal<InvalidArgument>("segments[0].span", admit({{1, "main", -1}}));
  expect_refusal<InvalidArgument>("segments[0].span", admit({{1, "main", INT32_MAX}}));
  expect_refusal<InvalidArgument>("stream", [&] { cache.kv.trim(unknown, 0); });
  expect_refusal<InvalidArgument>("num_tokens", [&] { cache.kv.trim({1}, 4); });
  expect_refusal<InvalidArgument>("num_tokens", [&] { cache.kv.trim({1}, -1); });
  expect_refusal<InvalidArgument>("request", [&] { cache.kv.remove(9); });
  expect_refusal<InvalidArgument>("stream", [&] { (void)cache.kv.length(unknown); });
  expect_refusal<InvalidArgument>("stream", [&] { (void)cache.kv.pages(unknown); });
  EXPECT_FALSE(cache.kv.contains({.request = 2}));

  ASSERT_TRUE(cache.kv.admit(std::vector<Segment>{{1, "main", 1}}));
  cache.kv.plan();
  expect_refusal<InvalidArgument>("label", [&] { cache.kv.label_plan("draft"); });
  expect_refusal<InvalidArgument>("ckv.shape",
                                  [&] { write_tokens(cache.kv, "main", count_from(0, 2)); });
  cache.kv.abandon();
  EXPECT_EQ(cache.counts(), before);
  EXPECT_EQ(cache.stored({.request = 1}), count_from(10, 3));
}

}  // namespace
}  // namespace mla::engine
