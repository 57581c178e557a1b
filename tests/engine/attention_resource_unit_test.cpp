#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "engine/two_requests.hpp"

// Plans of the attention resource: which rows see which keys, and the life of an early plan.
namespace mla::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const StreamName kOne{1, "main"}, kTwo{2, "main"}, kDraft{1, "draft"};

struct AttentionResourceUnit : TwoRequests {
  void plan(const Step& step, const SlotLease& where = {}) {
    ASSERT_TRUE(runner.admit(step));
    runner.plan(step, where);
  }
  // The refusal of a plan of this step, which is abandoned then.
  std::string plan_refusal(const Step& step, const SlotLease& where = {}) {
    EXPECT_TRUE(runner.admit(step));
    std::string text = refusal([&] { runner.plan(step, where); });
    if (text == "accepted") engine.abandon();
    return text;
  }
  void expect_in_bucket(const char* label, const std::vector<ExpectedRow>& expected,
                        int64_t num_rows, int64_t num_tokens, bool causal = true) {
    engine.expect_attends(label, 0, causal, expected,
                          Bucket{.num_rows = num_rows, .num_tokens = num_tokens});
  }
  static Step step_with(std::vector<Segment> segments, std::vector<AttentionPass> passes) {
    Step step = MiniEngine::step_of(std::move(segments));
    MiniEngine::attention_part(step).passes = std::move(passes);
    return step;
  }
};

TEST_F(AttentionResourceUnit, EachRowSeesItsStreamWithTheNewRows) {
  plan(MiniEngine::step_of({{.request = 1, .span = 3}, {.request = 2, .span = 2}}));
  engine.write_new_rows();
  engine.expect_attends("main", 0, true,
                        {{engine.rows_with_new(kOne), 3}, {engine.rows_with_new(kTwo), 2}});
}

TEST_F(AttentionResourceUnit, CausalComesFromTheStep) {
  plan(step_with({{.request = 1, .span = 3}}, {{.causal = false, .segments = {}}}));
  engine.write_new_rows();
  engine.expect_attends("main", 0, false, {{engine.rows_with_new(kOne), 3}});
}

TEST_F(AttentionResourceUnit, EachLabelHasAPlanOfItsOwn) {
  kv.open({.request = 1, .label = "draft"});
  plan(MiniEngine::step_of({{.request = 1, .label = "draft", .span = 2},
                            {.request = 2, .span = 1},
                            {.request = 1, .span = 4}}));
  engine.write_new_rows();
  engine.expect_attends("main", 0, true,
                        {{engine.rows_with_new(kTwo), 1}, {engine.rows_with_new(kOne), 4}});
  engine.expect_attends("draft", 0, true, {{engine.rows_with_new(kDraft), 2}});
}

TEST_F(AttentionResourceUnit, CombinedLabelsAttendInOnePlan) {
  kv.open({.request = 1, .label = "draft"});
  Step step = MiniEngine::step_of({{.request = 1, .label = "draft", .span = 2},
                                   {.request = 2, .span = 1},
                                   {.request = 1, .span = 4}});
  MiniEngine::kv_part(step).combined = {{.name = "both", .labels = {"main", "draft"}}};
  plan(step);
  engine.write_new_rows();
  engine.expect_attends("both", 0, true,
                        {{engine.rows_with_new(kTwo), 1},
                         {engine.rows_with_new(kOne), 4},
                         {engine.rows_with_new(kDraft), 2}});
}

TEST_F(AttentionResourceUnit, ContextOnlyQueriesSeeAllThatWasStoredAndNothingNew) {
  for (const bool causal : {false, true}) {
    plan(step_with({{.request = 1, .span = 3}, {.request = 2, .span = 7}},
                   {{.causal = causal,
                     .context_only = true,
                     .segments = {{.num_queries = 2}, {.num_queries = 5}}}}));
    engine.write_new_rows();
    // As if not causal, whatever the step says: the queries stand after the context.
    engine.expect_attends("main", 0, false, {{engine.rows(kOne), 2}, {engine.rows(kTwo), 5}});
    EXPECT_THAT(engine.kv_len("main"), ElementsAre(6, 3)) << "where the appended rows start";
    engine.abandon();
  }
}

TEST_F(AttentionResourceUnit, ContextOnlyDropsThePagesOfTheNewRows) {
  // 6 + 6 tokens are on 3 pages, the context on 2: within a limit of 2 listed pages.
  MiniEngine small({.limits = {.max_rows = 4, .max_tokens = 16, .max_listed_pages = 2}});
  small.kv.open({.request = 1});
  small.serve({{.request = 1, .span = 6}});
  Step step = step_with({{.request = 1, .span = 6}},
                        {{.context_only = true, .segments = {{.num_queries = 1}}}});
  ASSERT_TRUE(small.runner.admit(step));
  small.runner.plan(step);
  small.write_new_rows();
  small.expect_attends("main", 0, false, {{small.rows(kOne), 1}});
}

TEST_F(AttentionResourceUnit, ContextOnlyRowsMayHaveNoContextAndNoQueries) {
  kv.open({.request = 3});
  plan(step_with({{.request = 3, .span = 2}, {.request = 1, .span = 1}, {.request = 2, .span = 1}},
                 {{.context_only = true,
                   .segments = {{.num_queries = 2}, {.num_queries = 0}, {.num_queries = 1}}}}));
  engine.write_new_rows();
  engine.expect_attends("main", 0, false,
                        {{{}, 2}, {engine.rows(kOne), 0}, {engine.rows(kTwo), 1}});
}

TEST_F(AttentionResourceUnit, ContextAndNewRowsMergeToTheWhole) {
  // Pass 0 over the context, pass 1 over all; the part over the new rows alone is what is missing.
  plan(step_with({{.request = 1, .span = 1}},
                 {{.context_only = true, .segments = {{.num_queries = 1}}}, {.segments = {}}}));
  engine.write_new_rows();
  const auto context = engine.attend("main", 0), whole = engine.attend("main", 1);
  const std::vector<RowId> last = {engine.rows_with_new(kOne).back()};
  engine.abandon();
  kv.open({.request = 9});
  // A stream that holds the new row alone.
  const Step alone = MiniEngine::step_of({{.request = 9, .span = 1}});
  plan(alone);
  engine.write_row_ids(last);
  const auto fresh = engine.attend("main");
  const Device device = test::test_device();
  test::DeviceArray<float> merged(device, std::vector<float>(whole.out.size())),
      lse(device, std::vector<float>(whole.lse.size()));
  const std::array<int64_t, 3> out_shape = {1, 2, MiniEngine::kRank};
  const std::array<int64_t, 2> lse_shape = {1, 2};
  struct Part {
    explicit Part(const MiniEngine::Output& part)
        : out(test::test_device(), part.out), lse(test::test_device(), part.lse) {}
    test::DeviceArray<float> out, lse;
  };
  const Part first(context), second(fresh);
  const auto state = [&](const Part& part) {
    return PartialState{.out = part.out.view(out_shape), .lse = part.lse.view(lse_shape)};
  };
  const PartialState states[] = {state(first), state(second)};
  merge_states(states, merged.view(out_shape), lse.view(lse_shape));
  merged.read();
  lse.read();
  for (size_t i = 0; i < whole.out.size(); ++i) EXPECT_NEAR(merged.host[i], whole.out[i], 1e-5);
  for (size_t i = 0; i < whole.lse.size(); ++i) EXPECT_NEAR(lse.host[i], whole.lse[i], 1e-5);
}

// A draft chain: one step appends 3 rows, pass i has one query and sees i + 1 of them.
TEST_F(AttentionResourceUnit, PassesOverOneStreamSeeAsManyNewRowsAsTheyAreTold) {
  std::vector<AttentionPass> passes(3);
  for (int32_t i = 0; i < 3; ++i) {
    passes[i].segments = {{.num_queries = 1, .num_appended = i + 1},
                          {.num_queries = i, .num_appended = 2}};
  }
  plan(step_with({{.request = 1, .span = 3}, {.request = 2, .span = 2}}, passes));
  engine.write_new_rows();
  const std::vector<RowId> one = engine.rows_with_new(kOne), two = engine.rows_with_new(kTwo);
  for (int32_t i = 0; i < 3; ++i) {
    engine.expect_attends("main", i, true, {{{one.begin(), one.begin() + 7 + i}, 1}, {two, i}});
  }
}

// mstar-project/mstar PRs 264 and 271.
TEST_F(AttentionResourceUnit, RejectedRowsAreRewoundAndBothPassesEqualPlansOfTheirOwn) {
  engine.serve({{.request = 1, .span = 4}});
  kv.trim({.request = 1}, 2);
  engine.forget_last(kOne, 2);
  const int64_t free = kv.free_pages();
  EXPECT_EQ(free, 32 - 2 - 1) << "10 tokens on 3 pages, 8 on 2";
  plan(step_with({{.request = 1, .span = 1}},
                 {{.segments = {}}, {.context_only = true, .segments = {{.num_queries = 1}}}}));
  engine.write_new_rows();
  EXPECT_THAT(engine.kv_len("main", 0), ElementsAre(9));
  EXPECT_THAT(engine.kv_len("main", 1), ElementsAre(8));
  engine.expect_attends("main", 0, true, {{engine.rows_with_new(kOne), 1}});
  engine.expect_attends("main", 1, true, {{engine.rows(kOne), 1}});
}

// sgl-project/sglang PR 9990 (issue 9572): index building differed from mode to mode.
TEST_F(AttentionResourceUnit, EveryModeIndexesPagesOf16LikeOnePlainList) {
  MiniEngine paged({.page_size = 16});
  const auto step = [&](int32_t span) {
    const Step s = MiniEngine::step_of({{.request = 1, .span = span}});
    ASSERT_TRUE(paged.runner.admit(s));
    paged.runner.plan(s);
    paged.write_new_rows();
    paged.expect_attends("main", 0, true, {{paged.rows_with_new(kOne), span}});
    paged.commit();
  };
  paged.kv.open({.request = 1});
  step(20);  // prefill
  step(1);   // decode
  step(4);   // verify
  paged.kv.trim({.request = 1}, 3);
  paged.forget_last(kOne, 3);
  const Step s = step_with({{.request = 1, .span = 12}},
                           {{.context_only = true, .segments = {{.num_queries = 12}}}});
  ASSERT_TRUE(paged.runner.admit(s));
  paged.runner.plan(s);
  paged.write_new_rows();
  EXPECT_THAT(paged.kv_len("main"), ElementsAre(22));
  paged.expect_attends("main", 0, false, {{paged.rows(kOne), 12}});
}

TEST_F(AttentionResourceUnit, SegmentsThatDoNotPairWithTheRowsAreRefused) {
  const std::vector<Segment> two = {{.request = 1, .span = 3}, {.request = 2, .span = 2}};
  const auto refused = [&](AttentionPass pass) {
    return plan_refusal(step_with(two, {std::move(pass)}));
  };
  EXPECT_THAT(refused({.context_only = true, .segments = {{.num_queries = 1}}}),
              testing::AllOf(HasSubstr("passes[0].segments"), HasSubstr("1 segments")));
  EXPECT_THAT(refused({.context_only = true,
                       .segments = {{.num_queries = 1}, {.num_queries = 1}, {.num_queries = 1}}}),
              HasSubstr("3 segments"));
  EXPECT_THAT(refused({.context_only = true, .segments = {}}), HasSubstr("context-only"));
  EXPECT_THAT(refused({.segments = {{.num_queries = 1}, {.num_queries = -1}}}),
              HasSubstr("passes[0].segments[1].num_queries"));
  EXPECT_THAT(refused({.segments = {{.num_queries = 1, .num_appended = 4}, {.num_queries = 1}}}),
              testing::AllOf(HasSubstr("segments[0].num_appended"), HasSubstr("0 to 3")));
  EXPECT_THAT(refused({.segments = {{.num_queries = 1},
                                    {.num_queries = 1},
                                    {.label = "draft", .num_queries = 1}}}),
              testing::AllOf(HasSubstr("segments[2].label"), HasSubstr("\"draft\"")));
}

TEST_F(AttentionResourceUnit, ALabelInNoPassIsRefused) {
  kv.open({.request = 1, .label = "draft"});
  EXPECT_THAT(plan_refusal(step_with(
                  {{.request = 1, .span = 1}, {.request = 1, .label = "draft", .span = 1}},
                  {{.segments = {{.num_queries = 1}}}})),
              testing::AllOf(HasSubstr("passes"), HasSubstr("\"draft\"")));
}

TEST_F(AttentionResourceUnit, APassMayLeaveOutALabelThatAnotherHas) {
  kv.open({.request = 1, .label = "draft"});
  plan(step_with(
      {{.request = 1, .span = 2}, {.request = 1, .label = "draft", .span = 1}},
      {{.segments = {{.num_queries = 2}}}, {.segments = {{.label = "draft", .num_queries = 1}}}}));
  engine.write_new_rows();
  engine.expect_attends("main", 0, true, {{engine.rows_with_new(kOne), 2}});
  engine.expect_attends("draft", 1, true, {{engine.rows_with_new(kDraft), 1}});
  EXPECT_THROW(engine.attend("draft", 0), InvalidArgument);
}

TEST_F(AttentionResourceUnit, MoreThanTheLimitsIsRefusedAndThePlanBeforeStaysUsable) {
  const Step good = MiniEngine::step_of({{.request = 1, .span = 3}});
  plan(good);
  engine.write_new_rows();
  const PlanResults results = [&] {
    PlanResults r;
    r.set("kv", runner.results().get<KvPlan>("kv"));
    return r;
  }();
  const SlotLease eager{};
  const SlotLease narrow = lease(0, 1, 2), half = lease(0, 0, 8);
  EXPECT_THAT(refusal([&] { attention.plan(good, {.lease = narrow, .results = results}); }),
              testing::AllOf(HasSubstr("query tokens"), HasSubstr("at most 2"), HasSubstr("3")));
  EXPECT_THAT(refusal([&] { attention.plan(good, {.lease = half, .results = results}); }),
              testing::AllOf(HasSubstr("num_rows"), HasSubstr("1 to 16")));
  const SlotLease wide = lease(0, 17, 8), negative{.slot = -1};
  EXPECT_THAT(refusal([&] { attention.plan(good, {.lease = wide, .results = results}); }),
              testing::AllOf(HasSubstr("num_rows"), HasSubstr("1 to 16")));
  EXPECT_THAT(refusal([&] { attention.plan(good, {.lease = negative, .results = results}); }),
              HasSubstr("lease.slot"));
  Step bad = MiniEngine::step_of({});
  MiniEngine::attention_part(bad).passes[0].context_only = true;
  EXPECT_NE(refusal([&] { attention.plan(bad, {.lease = eager, .results = results}); }),
            "accepted");
  engine.expect_attends("main", 0, true, {{engine.rows_with_new(kOne), 3}});
}

TEST_F(AttentionResourceUnit, WithoutAKvPlanItSaysWhichKeyIsMissing) {
  const Step step = MiniEngine::step_of({});
  const SlotLease eager{};
  const PlanResults none;
  EXPECT_THAT(refusal([&] { attention.plan(step, {.lease = eager, .results = none}); }),
              HasSubstr("\"kv\""));
}

TEST_F(AttentionResourceUnit, APlanOlderThanTheLastDeclaredStepIsNotRun) {
  const Step step = MiniEngine::step_of({{.request = 1, .span = 1}});
  plan(step);
  engine.write_new_rows();
  engine.attend("main");
  engine.commit();
  engine.attend("main");  // still the last declared step
  ASSERT_TRUE(runner.admit(step));
  EXPECT_THROW(engine.attend("main"), InvalidState);
  runner.abandon();
  engine.attend("main");
  plan(step);
  runner.abandon();
  EXPECT_THROW(engine.attend("main"), InvalidState) << "its rows do not exist";
}

// One plan serves every layer.
TEST_F(AttentionResourceUnit, ThreeLayersOfOnePlanThenLengthsGrow) {
  MiniEngine layered({.num_layers = 3});
  layered.kv.open({.request = 1});
  for (int n = 0; n < 3; ++n) {
    const Step step = MiniEngine::step_of({{.request = 1, .span = 1}});
    ASSERT_TRUE(layered.runner.admit(step));
    layered.runner.plan(step);
    layered.write_new_rows();
    layered.expect_attends("main", 0, true, {{layered.rows_with_new(kOne), 1}});
    layered.commit();
  }
}

struct PrePlanUnit : AttentionResourceUnit {
  const Step now = MiniEngine::step_of({{.request = 1, .span = 2}});
  const Step next = MiniEngine::step_of({{.request = 1, .span = 1}, {.request = 2, .span = 2}});
  const SlotLease first = lease(0, 4, 8), second = lease(1, 4, 8);

  void start() {
    plan(now, first);
    engine.write_new_rows();
  }
  // The early plan's id.
  uint64_t pre_plan(const Step& step, const SlotLease& where) {
    EXPECT_TRUE(runner.pre_admit(step));
    return runner.pre_plan(step, where).get<AttentionPlan>("attention").id;
  }
  const AttentionPlan& planned() const { return runner.results().get<AttentionPlan>("attention"); }
};

TEST_F(PrePlanUnit, ThePlanInUseStaysAndThePromotedOneIsTheEarlyOne) {
  start();
  const PagedAttention* in_use = planned().entries[0].attention;
  ASSERT_TRUE(runner.pre_admit(next));
  const auto& early = runner.pre_plan(next, second).get<AttentionPlan>("attention");
  const PagedAttention* early_object = early.entries[0].attention;
  const uint64_t early_id = early.id;
  EXPECT_NE(early_object, in_use);
  expect_in_bucket("main", {{engine.rows_with_new(kOne), 2}}, 4, 8);
  engine.commit();
  plan(next, second);
  EXPECT_EQ(planned().id, early_id) << "no plan was made: the early one is in force";
  EXPECT_EQ(planned().entries[0].attention, early_object);
  EXPECT_EQ(planned().kv_plan_id, runner.results().get<KvPlan>("kv").id);
  engine.write_new_rows();
  expect_in_bucket("main", {{engine.rows_with_new(kOne), 1}, {engine.rows_with_new(kTwo), 2}}, 4,
                   8);
}

TEST_F(PrePlanUnit, AnotherLeaseOrOtherPassesArePlannedAfresh) {
  for (const bool other_lease : {true, false}) {
    start();
    const uint64_t early = pre_plan(next, second);
    engine.commit();
    Step step = MiniEngine::step_of({{.request = 1, .span = 1}, {.request = 2, .span = 2}});
    if (!other_lease) MiniEngine::attention_part(step).passes[0].causal = false;
    plan(step, other_lease ? lease(1, 4, 8, "verify") : second);
    EXPECT_NE(planned().id, early);
    engine.write_new_rows();
    expect_in_bucket("main", {{engine.rows_with_new(kOne), 1}, {engine.rows_with_new(kTwo), 2}}, 4,
                     8, other_lease);
    engine.commit();
  }
}

TEST_F(PrePlanUnit, AStaleEarlyPlanIsDroppedAndTheStepSeesTheStreamsAsTheyAre) {
  start();
  const uint64_t early = pre_plan(next, second);
  engine.commit();
  kv.trim({.request = 1}, 1);
  engine.forget_last(kOne, 1);
  plan(next, second);
  EXPECT_NE(planned().id, early);
  engine.write_new_rows();
  expect_in_bucket("main", {{engine.rows_with_new(kOne), 1}, {engine.rows_with_new(kTwo), 2}}, 4,
                   8);
}

TEST_F(PrePlanUnit, ASecondEarlyPlanIsAnErrorUntilTheFirstIsCleared) {
  start();
  pre_plan(next, second);
  const PlanResults results = [&] {
    PlanResults r;
    r.set("kv", runner.results().get<KvPlan>("kv"));
    return r;
  }();
  const SlotLease third = lease(2, 4, 8);
  const PlanContext again{.lease = third, .results = results, .is_preplan = true};
  EXPECT_THROW(attention.plan(now, again), InvalidState);
  attention.clear_preplan();
  attention.plan(now, again);
}

TEST_F(PrePlanUnit, ClearedEarlyPlansLeaveNothing) {
  start();
  const uint64_t early = pre_plan(next, second);
  runner.clear_preplan();
  expect_in_bucket("main", {{engine.rows_with_new(kOne), 2}}, 4, 8);
  engine.commit();
  plan(next, second);
  EXPECT_NE(planned().id, early);
}

TEST_F(PrePlanUnit, TheSlotOfThePlanInUseIsRefused) {
  start();
  ASSERT_TRUE(runner.pre_admit(next));
  EXPECT_THAT(refusal([&] { runner.pre_plan(next, first); }),
              testing::AllOf(HasSubstr("lease"), HasSubstr("slot 0")));
  expect_in_bucket("main", {{engine.rows_with_new(kOne), 2}}, 4, 8);
  pre_plan(next, lease(0, 4, 8, "prefill"));  // another bucket's objects are others
}

TEST_F(PrePlanUnit, EagerStepsArePlannedEarlyIntoTheOtherSlot) {
  plan(now);
  engine.write_new_rows();
  const uint64_t early = pre_plan(next, {.slot = 1});
  engine.expect_attends("main", 0, true, {{engine.rows_with_new(kOne), 2}});
  engine.commit();
  plan(next, {.slot = 1});
  EXPECT_EQ(planned().id, early);
  engine.write_new_rows();
  engine.expect_attends("main", 0, true,
                        {{engine.rows_with_new(kOne), 1}, {engine.rows_with_new(kTwo), 2}});
}

TEST_F(AttentionResourceUnit, LeasesThatNoGraphCanHaveAreRefusedBeforeAnythingIsSized) {
  const Step step = MiniEngine::step_of({{.request = 1, .span = 1}});
  const auto no_tokens = [](int64_t tokens) { return lease(0, 8, tokens); };
  for (const int64_t tokens : {int64_t{-1}, int64_t{0}, int64_t{1} << 31, int64_t{1} << 62,
                               std::numeric_limits<int64_t>::max()}) {
    EXPECT_THAT(plan_refusal(step, no_tokens(tokens)),
                testing::AllOf(HasSubstr("lease.bucket.shape.num_tokens"), HasSubstr("2147483647"),
                               HasSubstr(std::to_string(tokens))));
  }
  // Within what KV pages could serve, beyond what the attention can: nothing is laid out for it.
  EXPECT_THAT(plan_refusal(step, no_tokens(int64_t{1} << 30)),
              testing::AllOf(HasSubstr("AttentionResource"), HasSubstr("num_tokens"),
                             HasSubstr("1 to 64"), HasSubstr("got 1073741824")));
  EXPECT_THAT(plan_refusal(step, lease(0, 0, 8)), HasSubstr("lease.bucket.shape.num_rows"));
  EXPECT_THAT(plan_refusal(step, lease(-5, 2, 8)), HasSubstr("lease.slot"));
  EXPECT_EQ(plan_refusal(step, lease(0, 2, 8)), "accepted");
}

// flashinfer-ai/flashinfer issue 3219: pages of one size read as pages of another.
TEST_F(AttentionResourceUnit, APoolOfAnotherPageSizeThanThePlansIsRefused) {
  LatentPool other({.num_layers = 1,
                    .num_pages = 16,
                    .page_size = 8,
                    .kv_lora_rank = MiniEngine::kRank,
                    .qk_rope_head_dim = MiniEngine::kRope,
                    .dtype = DType::kFloat32,
                    .device = test::test_device()});
  AttentionResource wrong(other, "kv",
                          {.geometry = AttentionResource::geometry_of(other, 2),
                           .sm_scale = MiniEngine::kScale,
                           .limits = {.max_rows = 4, .max_tokens = 16, .max_listed_pages = 16}});
  StepRunner steps({&kv, &wrong});
  const Step step = MiniEngine::step_of({{.request = 1, .span = 1}});
  ASSERT_TRUE(steps.admit(step));
  EXPECT_THAT(refusal([&] { steps.plan(step); }),
              testing::AllOf(HasSubstr("page_size"), HasSubstr("8"), HasSubstr("4")));
  EXPECT_EQ(plan_refusal(step), "accepted") << "its own pool still serves";
}

// alibaba/rtp-llm PR 1259: scratch that grew after a capture.
TEST_F(AttentionResourceUnit, GraphBuffersDoNotGrow) {
  const GraphShape shapes[] = {{.num_rows = 2, .num_tokens = 8, .num_listed_pages = 3}};
  runner.size_graph_buffers(shapes);
  for (const SlotLease& larger : {lease(0, 3, 8), lease(0, 2, 9)}) {
    EXPECT_THAT(plan_refusal(MiniEngine::step_of({{.request = 1, .span = 1}}), larger),
                testing::AllOf(HasSubstr("KvResource"), HasSubstr("lease.bucket.shape."),
                               HasSubstr("of the largest graph")));
    EXPECT_THROW(engine.attention.check_lease(larger), InvalidArgument);
  }
  const Step step = MiniEngine::step_of({{.request = 1, .span = 2}, {.request = 2, .span = 2}});
  EXPECT_THAT(plan_refusal(step, lease(0, 2, 8)),
              testing::AllOf(HasSubstr("listed pages"), HasSubstr("at most 3")));
  EXPECT_EQ(plan_refusal(step), "accepted") << "eager plans have their own limits";
  const GraphShape beyond[] = {{.num_rows = 3, .num_tokens = 8, .num_listed_pages = 3}};
  EXPECT_THROW(runner.size_graph_buffers(beyond), InvalidState);
}

TEST_F(AttentionResourceUnit, LentScratchOfTheQueriedSizeServesEveryBucket) {
  AttentionOptions options{.geometry = AttentionResource::geometry_of(engine.pool, 2),
                           .sm_scale = 1,
                           .limits = {.max_rows = 16, .max_tokens = 64, .max_listed_pages = 64},
                           .splits = {.forced_count = 3},
                           .executor = std::make_shared<Executor>(2)};
  const size_t bytes = AttentionResource::scratch_bytes(engine.pool, options);
  const DeviceMemory scratch(test::test_device(), bytes);
  auto* memory = static_cast<std::byte*>(scratch.data());
  options.scratch = {memory, bytes - 1};
  EXPECT_THAT(
      refusal([&] { AttentionResource(engine.pool, "kv", options); }),
      testing::AllOf(HasSubstr(std::to_string(bytes)), HasSubstr(std::to_string(bytes - 1))));
  options.scratch = {static_cast<std::byte*>(nullptr), bytes};
  EXPECT_THAT(refusal([&] { AttentionResource(engine.pool, "kv", options); }), HasSubstr("null"));
  options.scratch = {memory, bytes};
  AttentionResource lent(engine.pool, "kv", options);
  PlanResults results;
  plan(MiniEngine::step_of({{.request = 1, .span = 1}}));
  results.set("kv", runner.results().get<KvPlan>("kv"));
  Step step;
  step.part<AttentionStep>("attention");
  for (const int64_t rows : {1, 2, 7, 16}) {
    for (const int64_t tokens : {1, 8, 64}) {
      const SlotLease where = lease(0, rows, tokens);
      lent.plan(step, {.lease = where, .results = results});
    }
  }
}

// sgl-project/sglang PR 4557, issue 5015 of flashinfer: padded rows.
TEST_F(AttentionResourceUnit, RowsBeyondTheLiveOnesAreEmptyAndLabelsWithoutRowsToo) {
  kv.open({.request = 1, .label = "draft"});
  const SlotLease bucket = lease(0, 8, 32);
  plan(
      MiniEngine::step_of({{.request = 1, .span = 4}, {.request = 1, .label = "draft", .span = 4}}),
      bucket);
  engine.write_new_rows();
  expect_in_bucket("draft", {{engine.rows_with_new(kDraft), 4}}, 8, 32);
  const int32_t* address = attention.kv_len_buf("draft").data;
  engine.commit();
  // The bucket's graph replays both labels, so the one without rows is planned empty.
  plan(MiniEngine::step_of({{.request = 1, .span = 4}, {.request = 2, .span = 1}}), bucket);
  engine.write_new_rows();
  expect_in_bucket("main", {{engine.rows_with_new(kOne), 4}, {engine.rows_with_new(kTwo), 1}}, 8,
                   32);
  expect_in_bucket("draft", {}, 8, 32);
  EXPECT_EQ(attention.kv_len_buf("draft").data, address);
}

}  // namespace
}  // namespace mla::engine
