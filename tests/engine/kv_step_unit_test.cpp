#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "engine/mini_engine.hpp"
#include "mla/error.hpp"

// What a KvStep has besides its segments: forks, combined labels, and admission ahead of time.
namespace mla::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const KvStream kMain{.request = 1}, kDraft{.request = 1, .label = "draft"};

KvStep kv_step(std::vector<Segment> segments) {
  KvStep step;
  step.segments = std::move(segments);
  return step;
}

// Pages of 4 tokens; request 1 has 6, request 2 has 4.
struct KvStepUnit : testing::Test {
  MiniEngine engine{{.num_pages = 8}};
  KvResource& kv = engine.kv;

  void SetUp() override {
    kv.open(kMain);
    kv.open({.request = 2});
    engine.serve({{.request = 1, .span = 6}, {.request = 2, .span = 4}});
  }
  void commit(const KvStep& step) {
    ASSERT_TRUE(kv.admit(step));
    kv.plan();
    kv.commit();
  }
  std::string refusal(const KvStep& step) {
    const PageCounts before = kv.check();
    std::string text = "accepted";
    try {
      kv.admit(step);
    } catch (const InvalidArgument& error) {
      text = error.what();
    }
    EXPECT_EQ(kv.check(), before);
    return text;
  }
  std::vector<int32_t> pages(const KvStream& stream) const {
    const auto span = kv.pages(stream);
    return {span.begin(), span.end()};
  }
};

TEST_F(KvStepUnit, AForkBeforeTheStepSharesPagesAndTheFirstToAppendCopies) {
  KvStep step = kv_step({{.request = 1, .span = 1}, {.request = 1, .label = "draft", .span = 1}});
  step.forks_before = {{.source = kMain, .target = kDraft}};
  const std::vector<int32_t> before = pages(kMain);
  ASSERT_TRUE(kv.admit(step));
  EXPECT_FALSE(kv.contains(kDraft)) << "made at plan";
  EXPECT_EQ(kv.check().reserved, 1) << "a copy of the page that both append to";
  kv.plan();
  EXPECT_TRUE(kv.contains(kDraft));
  kv.commit();
  EXPECT_EQ(kv.length(kDraft), 7);
  EXPECT_EQ(pages(kDraft), before) << "the last one to append keeps the page";
  EXPECT_EQ(pages(kMain)[0], before[0]);
  EXPECT_NE(pages(kMain)[1], before[1]);
}

TEST_F(KvStepUnit, AForkAfterTheStepHasWhatTheStepLeaves) {
  KvStep step = kv_step({{.request = 1, .span = 3}});
  step.forks_after = {{.source = kMain, .target = {.request = 3}},
                      {.source = {.request = 3}, .target = {.request = 4}},
                      {.source = {.request = 2}, .target = {.request = 2, .label = "draft"}}};
  ASSERT_TRUE(kv.admit(step));
  kv.plan();
  EXPECT_FALSE(kv.contains({.request = 3})) << "made at commit";
  EXPECT_THROW(kv.remove(2), InvalidState) << "the step forks it at its commit";
  EXPECT_THROW(kv.open({.request = 3}), InvalidArgument) << "the step makes it";
  kv.commit();
  EXPECT_EQ(kv.length({.request = 3}), 9);
  EXPECT_EQ(pages({.request = 4}), pages(kMain));
  EXPECT_EQ(kv.length({.request = 2, .label = "draft"}), 4);
}

TEST_F(KvStepUnit, TheCopyOfAForkCountsInTheShortageAndARefusalChangesNothing) {
  // 3 of 8 pages are held. The draft needs a copy and 4 pages more: 5 in all, one of them main's.
  KvStep step = kv_step({{.request = 1, .span = 1}, {.request = 1, .label = "draft", .span = 18}});
  step.forks_before = {{.source = kMain, .target = kDraft}};
  step.forks_after = {{.source = kMain, .target = {.request = 9}}};
  const PageCounts before = kv.check();
  ASSERT_TRUE(kv.admit(step));
  EXPECT_EQ(kv.check().free, 0);
  kv.abandon();
  EXPECT_EQ(kv.check(), before);

  step.segments[1].span = 19;
  const AdmitResult result = kv.admit(step);
  EXPECT_EQ(result.pages_short, 1);
  ASSERT_EQ(result.shortages.size(), 1U);
  EXPECT_EQ(result.shortages[0].request, 1U);
  EXPECT_EQ(result.shortages[0].label, "draft");
  EXPECT_EQ(kv.check(), before);
  EXPECT_FALSE(kv.contains(kDraft));
  EXPECT_EQ(kv.open(kDraft), 0) << "nothing is left of the fork";
  EXPECT_EQ(kv.open({.request = 9}), 0);
}

TEST_F(KvStepUnit, AbandonUndoesTheForksOfAPlannedStep) {
  const PageCounts before = kv.check();
  KvStep step = kv_step({{.request = 3, .span = 5}});
  step.forks_before = {{.source = {.request = 2}, .target = {.request = 3}}};
  step.forks_after = {{.source = {.request = 3}, .target = {.request = 4}}};
  ASSERT_TRUE(kv.admit(step));
  kv.plan();
  kv.abandon();
  EXPECT_EQ(kv.check(), before);
  EXPECT_FALSE(kv.contains({.request = 3}));
  EXPECT_FALSE(kv.contains({.request = 4}));
  commit(step);
  EXPECT_EQ(kv.length({.request = 4}), 9);
}

TEST_F(KvStepUnit, BadForksAreRefusedByName) {
  KvStep step;
  step.forks_before = {{.source = {.request = 5}, .target = kDraft}};
  EXPECT_THAT(refusal(step), HasSubstr("forks_before[0].source"));
  step.forks_before = {{.source = kMain, .target = kDraft}, {.source = kMain, .target = kDraft}};
  EXPECT_THAT(refusal(step), HasSubstr("forks_before[1].target"));
  step.forks_before = {{.source = kMain, .target = {.request = 2}}};
  EXPECT_THAT(refusal(step), HasSubstr("forks_before[0].target"));
  step.forks_before = {};
  step.forks_after = {{.source = kMain, .target = kDraft}, {.source = kDraft, .target = kMain}};
  EXPECT_THAT(refusal(step), HasSubstr("forks_after[1].target"));
  step.segments = {{.request = 1, .label = "draft", .span = 1}};
  step.forks_after = {{.source = kMain, .target = kDraft}};
  EXPECT_THAT(refusal(step), HasSubstr("segments[0]")) << "it is there after the step only";
}

TEST_F(KvStepUnit, CombinedLabelsArePackedLabelByLabel) {
  kv.open(kDraft);
  kv.open({.request = 2, .label = "draft"});
  kv.open({.request = 2, .label = "alone"});
  KvStep step = kv_step({{.request = 1, .label = "draft", .span = 1},
                         {.request = 1, .span = 2},
                         {.request = 2, .label = "alone", .span = 1},
                         {.request = 2, .span = 1},
                         {.request = 2, .label = "draft", .span = 3}});
  const std::vector<std::string_view> both = {"main", "draft"};
  step.combined = {{.name = "both", .labels = both}};
  ASSERT_TRUE(kv.admit(step));
  const auto plans = kv.plan();
  ASSERT_EQ(plans.size(), 2U);
  EXPECT_EQ(plans[0].label, "both");
  EXPECT_EQ(plans[1].label, "alone");
  const LabelPlan& plan = kv.label_plan("both");
  std::vector<std::string> order;
  for (const KvView& view : plan.views) {
    order.push_back(std::to_string(view.request) + " " + std::string(view.label));
  }
  EXPECT_THAT(order, ElementsAre("1 main", "2 main", "1 draft", "2 draft"));
  EXPECT_THAT(plan.qo_indptr, ElementsAre(0, 2, 3, 4, 7));
  EXPECT_THAT(plan.kv_len, ElementsAre(8, 5, 1, 3));
  EXPECT_EQ(plan.slots.size(), 7U);
  EXPECT_EQ(plan.slots[3], int64_t{kv.pages(kDraft)[0]} * 4);
  EXPECT_EQ(kv.label_plan("alone").num_new_rows(), 1);
  EXPECT_THROW(kv.label_plan("main"), InvalidArgument) << "it has no plan of its own";
}

TEST_F(KvStepUnit, BadCombinationsAreRefusedByName) {
  kv.open(kDraft);
  KvStep step = kv_step({{.request = 1, .span = 1}, {.request = 1, .label = "draft", .span = 1}});
  step.combined = {{.name = "both", .labels = {"main"}}, {.name = "two", .labels = {"main"}}};
  EXPECT_THAT(refusal(step), HasSubstr("combined[1].labels"));
  step.combined = {{.name = "both", .labels = {"main"}}, {.name = "both", .labels = {"draft"}}};
  EXPECT_THAT(refusal(step), HasSubstr("combined[1].name"));
  step.combined = {{.name = "draft", .labels = {"main"}}};
  EXPECT_THAT(refusal(step), HasSubstr("combined[0].name"));
  step.combined = {{.name = "both", .labels = {}}};
  EXPECT_THAT(refusal(step), HasSubstr("combined[0].labels"));
}

TEST_F(KvStepUnit, LabelsAskedForArePlannedWithoutSegments) {
  KvStep step = kv_step({{.request = 1, .span = 1}});
  step.labels = {"main", "guidance"};
  step.combined = {{.name = "both", .labels = {"left", "right"}}};
  ASSERT_TRUE(kv.admit(step));
  const auto plans = kv.plan();
  ASSERT_EQ(plans.size(), 3U);
  EXPECT_EQ(plans[1].label, "guidance");
  EXPECT_THAT(plans[1].qo_indptr, ElementsAre(0));
  EXPECT_THAT(plans[1].kv_indptr, ElementsAre(0));
  EXPECT_EQ(plans[2].label, "both");
}

TEST_F(KvStepUnit, UnderABucketPaddedRowsGetNoSlot) {
  Step step = MiniEngine::step_of({{.request = 1, .span = 2}});
  ASSERT_TRUE(kv.admit(step));
  const SlotLease lease{.slot = 0,
                        .bucket = GraphBucket{"decode", {.num_rows = 4, .num_tokens = 5}}};
  const PlanResults results;
  kv.plan(step, {.lease = lease, .results = results});
  const LabelPlan& plan = kv.label_plan();
  const int64_t first = int64_t{kv.pages(kMain)[1]} * 4 + 2;
  EXPECT_THAT(plan.slots, ElementsAre(first, first + 1, -1, -1, -1));
  EXPECT_EQ(plan.num_new_rows(), 2);
  EXPECT_THAT(test::read_back(kv.slots_buf()), testing::ElementsAreArray(plan.slots));
  EXPECT_THROW(kv.slots_buf("draft"), InvalidArgument);
  // Rows of the whole bucket are taken, those past the live ones go nowhere.
  const test::DeviceArray<float> rows(test::test_device(), std::vector<float>(5 * 12, 7.0F));
  const auto view = rows.view(std::array<int64_t, 2>{5, 12});
  kv.write(0, "main", columns(view, 0, 8), columns(view, 8, 4));
  test::DeviceArray<float> sink(test::test_device(), std::vector<float>(12, 0.0F));
  const int64_t sink_slot[] = {int64_t{engine.pool.sink_page()} * 4};
  engine.pool.gather(0, sink_slot, sink.view(std::array<int64_t, 2>{1, 12}));
  EXPECT_THAT(sink.read(), testing::Each(0.0F));
  kv.commit();
}

// Step N+1 admitted while step N is in flight.
struct KvEarlyUnit : KvStepUnit {
  // Request 1 grows from 6 to 9 tokens, its third page.
  void start() {
    ASSERT_TRUE(kv.admit(in_flight));
    plan(in_flight);
  }
  const KvPlan& plan(const Step& step, const SlotLease& lease = {}) {
    return kv.plan(step, {.lease = lease, .results = results});
  }
  const KvPlan& pre_plan(const Step& step, const SlotLease& lease = {.slot = 1}) {
    return kv.plan(step, {.lease = lease, .results = results, .is_preplan = true});
  }

  const PlanResults results;
  const Step in_flight = MiniEngine::step_of({{.request = 1, .span = 3}});
  const Step next = MiniEngine::step_of({{.request = 1, .span = 4}, {.request = 2, .span = 1}});
};

TEST_F(KvEarlyUnit, PagesAreTakenOnTopOfTheStepInFlightAndOnlyOnce) {
  start();
  const PageCounts before = kv.check();
  ASSERT_TRUE(kv.pre_admit(next));
  EXPECT_EQ(kv.check().reserved, before.reserved + 2) << "13 tokens and 5: a page each";
  ASSERT_TRUE(kv.pre_admit(next)) << "again reserves nothing";
  EXPECT_EQ(kv.check().reserved, before.reserved + 2);
  kv.commit();
  const int64_t free = kv.free_pages();
  ASSERT_TRUE(kv.admit(next));
  EXPECT_EQ(kv.free_pages(), free) << "admitting what is reserved reserves nothing";
  EXPECT_EQ(kv.pages(kMain).size(), 4U);
}

TEST_F(KvEarlyUnit, AShortageOfTheEarlyStepChangesNothing) {
  start();
  const PageCounts before = kv.check();
  const AdmitResult result = kv.pre_admit(MiniEngine::step_of({{.request = 1, .span = 24}}));
  EXPECT_EQ(result.pages_short, 2) << "33 tokens want 9 pages, 3 are held, 4 are free";
  ASSERT_EQ(result.shortages.size(), 1U);
  EXPECT_EQ(kv.check(), before);
  EXPECT_THROW(pre_plan(next), InvalidState);
}

TEST_F(KvEarlyUnit, AnEarlyPlanIsPromotedAsItIs) {
  start();
  const LabelPlan& current = kv.label_plan();
  const int32_t* arrays = current.kv_indices.data();
  ASSERT_TRUE(kv.pre_admit(next));
  const KvPlan& early = pre_plan(next);
  const uint64_t id = early.id;
  ASSERT_EQ(early.labels.size(), 1U);
  EXPECT_THAT(early.labels[0].kv_len, ElementsAre(13, 5));
  EXPECT_EQ(early.labels[0].views[0].start, 9) << "as if the step in flight were committed";
  const int32_t* early_arrays = early.labels[0].kv_indices.data();
  EXPECT_EQ(kv.label_plan().kv_indices.data(), arrays) << "the plan in use stays";
  EXPECT_THAT(kv.label_plan().kv_len, ElementsAre(9));
  EXPECT_THROW(pre_plan(next), InvalidState) << "a second one";

  kv.commit();
  ASSERT_TRUE(kv.admit(next));
  const KvPlan& promoted = plan(next, {.slot = 1});
  EXPECT_EQ(promoted.id, id);
  EXPECT_EQ(promoted.labels[0].kv_indices.data(), early_arrays) << "no work";
  EXPECT_THAT(promoted.labels[0].views[0].pages, testing::ElementsAreArray(kv.pages(kMain)));
  kv.commit();
  EXPECT_EQ(kv.length(kMain), 13);
}

TEST_F(KvEarlyUnit, AnotherLeaseIsPlannedAfresh) {
  start();
  ASSERT_TRUE(kv.pre_admit(next));
  const uint64_t id = pre_plan(next).id;
  kv.commit();
  ASSERT_TRUE(kv.admit(next));
  EXPECT_NE(plan(next, {.slot = 0}).id, id);
}

struct Change {
  const char* name;
  void (*make)(KvResource& kv);
};
void PrintTo(const Change& change, std::ostream* out) { *out << change.name; }

struct KvEarlyChangeUnit : KvEarlyUnit, testing::WithParamInterface<Change> {};

TEST_P(KvEarlyChangeUnit, DropsTheEarlyStepAndGivesItsPagesBack) {
  start();
  ASSERT_TRUE(kv.pre_admit(next));
  const uint64_t id = pre_plan(next).id;
  EXPECT_EQ(kv.check().reserved, 3) << "one of them for the step in flight";
  GetParam().make(kv);
  EXPECT_LE(kv.check().reserved, 1);
  EXPECT_THROW(pre_plan(next), InvalidState);
  if (!kv.contains({.request = 2}) || kv.length(kMain) != 6) return;
  if (kv.check().reserved == 1) kv.commit();
  ASSERT_TRUE(kv.admit(next));
  EXPECT_NE(plan(next, {.slot = 1}).id, id);
}

INSTANTIATE_TEST_SUITE_P(
    Changes, KvEarlyChangeUnit,
    testing::Values(Change{"Trim", [](KvResource& kv) { kv.trim({.request = 2}, 1); }},
                    Change{"Fork", [](KvResource& kv) { kv.fork({.request = 2}, {.request = 3}); }},
                    Change{"Remove", [](KvResource& kv) { kv.remove(2); }},
                    Change{"Abandon", [](KvResource& kv) { kv.abandon(); }},
                    Change{"Clear", [](KvResource& kv) { kv.clear_preplan(); }}),
    [](const auto& change) { return change.param.name; });

TEST_F(KvEarlyUnit, ChangesOfOtherStreamsLeaveItAlone) {
  kv.open({.request = 3});
  kv.open({.request = 4});
  start();
  ASSERT_TRUE(kv.pre_admit(next));
  const uint64_t id = pre_plan(next).id;
  kv.remove(3);
  kv.fork({.request = 4}, {.request = 5});
  kv.open({.request = 6});
  kv.commit();
  kv.trim({.request = 4}, 0);
  ASSERT_TRUE(kv.admit(next));
  EXPECT_EQ(plan(next, {.slot = 1}).id, id);
}

TEST_F(KvEarlyUnit, TrimAfterCommitMakesItStaleAndTheStepIsPlannedAfresh) {
  start();
  ASSERT_TRUE(kv.pre_admit(next));
  const uint64_t id = pre_plan(next).id;
  kv.commit();
  kv.trim(kMain, 2);  // rejected speculative rows
  ASSERT_TRUE(kv.admit(next));
  const KvPlan& fresh = plan(next, {.slot = 1});
  EXPECT_NE(fresh.id, id);
  EXPECT_THAT(fresh.labels[0].kv_len, ElementsAre(11, 5));
}

TEST_F(KvEarlyUnit, AdmittingAnotherStepDropsIt) {
  start();
  ASSERT_TRUE(kv.pre_admit(next));
  kv.commit();
  ASSERT_TRUE(kv.admit(kv_step({{.request = 2, .span = 1}})));
  EXPECT_EQ(kv.check().reserved, 1);
}

TEST_F(KvEarlyUnit, ARefusedStepLeavesItAsItWas) {
  Step forking = MiniEngine::step_of({{.request = 1, .span = 4}, {.request = 3, .span = 2}});
  MiniEngine::kv_part(forking).forks_before = {
      {.source = {.request = 2}, .target = {.request = 3}}};
  start();
  ASSERT_TRUE(kv.pre_admit(forking));
  const uint64_t id = pre_plan(forking).id;
  kv.commit();
  const PageCounts before = kv.check();
  KvStep short_of_pages = kv_step({{.request = 2, .span = 100}});
  short_of_pages.forks_before = {{.source = kMain, .target = {.request = 3}}};  // a name it uses
  EXPECT_EQ(kv.admit(short_of_pages).pages_short, 25 - (before.free + before.reserved));
  EXPECT_NE(refusal(kv_step({{.request = 2, .span = 1}, {.request = 9}})), "accepted");
  EXPECT_NE(refusal(kv_step({{.request = 3, .span = 1}})), "accepted") << "not made yet";
  EXPECT_EQ(kv.check(), before);
  ASSERT_TRUE(kv.admit(forking));
  EXPECT_EQ(plan(forking, {.slot = 1}).id, id);
  kv.commit();
  EXPECT_EQ(kv.length({.request = 3}), 6);
}

TEST_F(KvEarlyUnit, WhatItHoldsIsToBeHadByAnotherStep) {
  start();
  ASSERT_TRUE(kv.pre_admit(next));
  kv.commit();
  const int64_t all = kv.free_pages() + kv.check().reserved;
  ASSERT_TRUE(kv.admit(kv_step({{.request = 2, .span = static_cast<int32_t>(all) * 4}})));
  EXPECT_EQ(kv.free_pages(), 0);
  EXPECT_EQ(kv.check().reserved, all);
}

TEST_F(KvEarlyUnit, APageReplacedByAKnownOneMakesThePlanStaleButKeepsThePages) {
  const PageKey key{.high = 1, .low = 2};
  kv.open({.request = 7}, 0, std::span(&key, 1));
  kv.open({.request = 8}, 0, std::span(&key, 1));
  const Step fill = MiniEngine::step_of({{.request = 7, .span = 4}, {.request = 8, .span = 4}});
  const Step after = MiniEngine::step_of({{.request = 7, .span = 1}, {.request = 8, .span = 1}});
  ASSERT_TRUE(kv.admit(fill));
  plan(fill);
  ASSERT_TRUE(kv.pre_admit(after));
  const uint64_t id = pre_plan(after).id;
  kv.commit();  // both pages are full and equal: one of them is dropped
  ASSERT_EQ(pages({.request = 7}), pages({.request = 8}));
  EXPECT_EQ(kv.check().reserved, 2);
  ASSERT_TRUE(kv.admit(after));
  const KvPlan& fresh = plan(after, {.slot = 1});
  EXPECT_NE(fresh.id, id);
  EXPECT_THAT(fresh.labels[0].views[1].pages, testing::ElementsAreArray(pages({.request = 8})));
}

TEST_F(KvEarlyUnit, NoRowIsTouchedBeforeTheEarlyStepIsPromoted) {
  kv.fork({.request = 2}, {.request = 3});
  kv.trim({.request = 2}, 1);
  kv.trim({.request = 3}, 1);  // both share a page of three rows
  const Step both = MiniEngine::step_of({{.request = 2, .span = 1}, {.request = 3, .span = 1}});
  start();
  ASSERT_TRUE(kv.pre_admit(both));
  const KvPlan& early = pre_plan(both);
  const int32_t copy = early.labels[0].views[0].pages[0];
  ASSERT_NE(copy, pages({.request = 2})[0]);
  const auto first_row = [&](int32_t page) {
    test::DeviceArray<float> row(test::test_device(), std::vector<float>(12));
    const int64_t slot[] = {int64_t{page} * 4};
    engine.pool.gather(1, slot, row.view(std::array<int64_t, 2>{1, 12}));
    return row.read();
  };
  EXPECT_THAT(first_row(copy), testing::Each(0.0F));
  kv.commit();
  ASSERT_TRUE(kv.admit(both));
  plan(both, {.slot = 1});
  EXPECT_EQ(pages({.request = 2})[0], copy);
  EXPECT_EQ(first_row(copy), first_row(pages({.request = 3})[0]));
}

TEST_F(KvEarlyUnit, EarlyForksAreMadeAtPlanAndUndoneWithTheStep) {
  start();
  Step forking = MiniEngine::step_of({{.request = 3, .span = 2}});
  MiniEngine::kv_part(forking).forks_before = {
      {.source = {.request = 2}, .target = {.request = 3}}};
  const PageCounts before = kv.check();
  ASSERT_TRUE(kv.pre_admit(forking));
  EXPECT_FALSE(kv.contains({.request = 3}));
  kv.clear_preplan();
  EXPECT_EQ(kv.check(), before);
  ASSERT_TRUE(kv.pre_admit(forking));
  const uint64_t id = pre_plan(forking).id;
  kv.commit();
  ASSERT_TRUE(kv.admit(forking));
  EXPECT_EQ(plan(forking, {.slot = 1}).id, id);
  kv.commit();
  EXPECT_EQ(kv.length({.request = 3}), 6);
  EXPECT_EQ(pages({.request = 3})[0], pages({.request = 2})[0]);
}

TEST_F(KvEarlyUnit, StreamsThatTheStepInFlightForksWaitForItsCommit) {
  Step forking = MiniEngine::step_of({{.request = 1, .span = 1}});
  MiniEngine::kv_part(forking).forks_after = {{.source = kMain, .target = {.request = 3}}};
  ASSERT_TRUE(kv.admit(forking));
  plan(forking);
  EXPECT_THROW(kv.pre_admit(next), InvalidState) << "request 1 is shared at the commit";
  EXPECT_THROW(kv.pre_admit(MiniEngine::step_of({{.request = 3, .span = 1}})), InvalidState);
  Step of_running = MiniEngine::step_of({});
  MiniEngine::kv_part(of_running).forks_before = {{.source = kMain, .target = kDraft}};
  EXPECT_THROW(kv.pre_admit(of_running), InvalidState);
  EXPECT_TRUE(kv.pre_admit(MiniEngine::step_of({{.request = 2, .span = 1}})));
  kv.commit();
  EXPECT_EQ(kv.length({.request = 3}), 7);
}

TEST_F(KvEarlyUnit, CallsOutOfOrderAreRefused) {
  EXPECT_THROW(pre_plan(next), InvalidState);
  ASSERT_TRUE(kv.admit(in_flight));
  EXPECT_THROW(kv.pre_admit(next), InvalidState) << "admitted, not planned";
  EXPECT_THROW(plan(next), InvalidArgument) << "another step than the admitted one";
  plan(in_flight);
  ASSERT_TRUE(kv.pre_admit(next));
  EXPECT_THROW(kv.pre_admit(in_flight), InvalidState) << "one is pre-admitted";
  EXPECT_THROW(pre_plan(in_flight), InvalidArgument) << "another step than the pre-admitted one";
  EXPECT_THROW(kv.admit(next), InvalidState) << "a step is in flight";
}

}  // namespace
}  // namespace mla::engine
