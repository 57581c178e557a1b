#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "mla/error.hpp"
#include "mla/step_runner.hpp"

namespace mla {
namespace {

struct FakeStep : ResourceStep {
  static constexpr const char* kKind = "FakeStep";
  FakeStep() : ResourceStep(kKind) {}
};

struct OtherStep : ResourceStep {
  static constexpr const char* kKind = "OtherStep";
  OtherStep() : ResourceStep(kKind) {}
};

struct FakePlan : ResourcePlan {
  static constexpr const char* kKind = "FakePlan";
  FakePlan() : ResourcePlan(kKind) {}
  int number = 0;
};

// Writes every call into a shared list.
class FakeResource : public Resource {
 public:
  FakeResource(std::string key, std::vector<std::string>& calls,
               std::vector<std::string> dependencies = {}, bool preplans = true)
      : key_(std::move(key)),
        dependencies_(std::move(dependencies)),
        preplans_(preplans),
        calls_(calls) {}

  const std::string& key() const noexcept override { return key_; }
  std::vector<std::string> depends_on() const override { return dependencies_; }
  bool supports_preplan() const noexcept override { return preplans_; }
  bool force_double_buffer() const noexcept override { return double_buffer; }
  AdmitResult admit(const Step&) override {
    note("admit");
    if (throws == "admit") throw_state({"fake", "admit", "nothing", "a throw"});
    return shortage;
  }
  void check_lease(const SlotLease& wanted) const override {
    if (wanted.slot > last_slot) throw_invalid({"lease.slot", "fake", "less", "more"});
  }
  void abandon() override { note("abandon"); }
  const FakePlan& plan(const Step&, const PlanContext& context) override {
    note(context.is_preplan ? "pre_plan" : "plan");
    if (throws == "plan") throw_state({"fake", "plan", "nothing", "a throw"});
    for (const std::string& key : dependencies_) seen = context.results.get<FakePlan>(key).number;
    lease = context.lease;
    ++plan_.number;
    return plan_;
  }
  void commit() override { note("commit"); }
  AdmitResult pre_admit(const Step&) override {
    note("pre_admit");
    return shortage;
  }
  void clear_preplan() override { note("clear"); }
  void order_replay(Stream) override { note("order"); }
  void size_graph_buffers(const GraphShape& largest) override { shapes.push_back(largest); }

  std::string throws;
  AdmitResult shortage;
  bool double_buffer = false;
  int seen = -1;
  SlotLease lease;
  int32_t last_slot = 1;
  std::vector<GraphShape> shapes;

 private:
  void note(const char* what) { calls_.push_back(key_ + "." + what); }

  std::string key_;
  std::vector<std::string> dependencies_;
  bool preplans_;
  std::vector<std::string>& calls_;
  FakePlan plan_;
};

struct Calls : testing::Test {
  std::vector<std::string> calls;
  Step step;

  std::vector<std::string> take() { return std::exchange(calls, {}); }
};

std::vector<std::string> keys(const StepRunner& runner) {
  std::vector<std::string> result;
  for (const Resource* resource : runner.order()) result.push_back(resource->key());
  return result;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

using testing::ElementsAre;
using testing::HasSubstr;
using StepRunnerUnit = Calls;

TEST_F(StepRunnerUnit, ResourcesComeAfterWhatTheyDependOn) {
  FakeResource a("a", calls, {"b", "c"}), b("b", calls, {"c"}), c("c", calls), d("d", calls);
  EXPECT_THAT(keys(StepRunner({&a, &b, &c, &d})), ElementsAre("c", "b", "a", "d"));
}

TEST_F(StepRunnerUnit, CyclesUnknownKeysAndDuplicatesAreRefusedByName) {
  FakeResource a("a", calls, {"b"}), b("b", calls, {"c"}), c("c", calls, {"a"}),
      free("free", calls);
  EXPECT_THAT(refusal([&] {
                StepRunner({&free, &a, &b, &c});
              }),
              testing::AllOf(HasSubstr("cycle"), HasSubstr("\"a\", \"b\", \"c\"")));
  FakeResource self("self", calls, {"self"});
  EXPECT_THAT(refusal([&] { StepRunner({&self}); }), HasSubstr("\"self\""));
  FakeResource lost("lost", calls, {"nowhere"});
  EXPECT_THAT(refusal([&] { StepRunner({&lost}); }), HasSubstr("\"nowhere\""));
  FakeResource twin("free", calls);
  EXPECT_THAT(refusal([&] { StepRunner({&free, &twin}); }), HasSubstr("\"free\""));
  EXPECT_THAT(refusal([&] { StepRunner({&free, nullptr}); }), HasSubstr("resources[1]"));
}

TEST_F(StepRunnerUnit, APrePlanningResourceOverOneThatDoesNotIsRefused) {
  FakeResource plain("plain", calls, {}, false), early("early", calls, {"plain"}, true);
  EXPECT_THAT(refusal([&] {
                StepRunner({&plain, &early});
              }),
              testing::AllOf(HasSubstr("\"early\""), HasSubstr("\"plain\"")));
  FakeResource late("late", calls, {"plain"}, false);
  EXPECT_EQ(refusal([&] { StepRunner({&plain, &late}); }), "accepted");
}

TEST_F(StepRunnerUnit, AStepGoesThroughAllResourcesInOrder) {
  FakeResource kv("kv", calls), attention("attention", calls, {"kv"});
  StepRunner runner({&attention, &kv});
  ASSERT_TRUE(runner.admit(step));
  runner.plan(step);
  runner.commit();
  EXPECT_THAT(take(), ElementsAre("kv.admit", "attention.admit", "kv.plan", "attention.plan",
                                  "kv.commit", "attention.commit"));
}

TEST_F(StepRunnerUnit, PlansArePublishedToTheResourcesAfterThem) {
  FakeResource kv("kv", calls), attention("attention", calls, {"kv"});
  StepRunner runner({&attention, &kv});
  for (int n = 1; n <= 2; ++n) {
    ASSERT_TRUE(runner.admit(step));
    const PlanResults& results =
        runner.plan(step, {.slot = 1, .bucket = GraphBucket{"decode", {}}});
    EXPECT_EQ(attention.seen, n);
    EXPECT_EQ(attention.lease.bucket->walk, "decode");
    EXPECT_EQ(results.get<FakePlan>("kv").number, n);
    EXPECT_THAT(refusal([&] { (void)results.get<FakePlan>("none"); }), HasSubstr("\"none\""));
    runner.commit();
  }
}

TEST_F(StepRunnerUnit, ARefusalAbandonsWhatWasAdmittedAndSaysWhoIsShort) {
  FakeResource a("a", calls), b("b", calls, {"a"}), c("c", calls, {"b"});
  StepRunner runner({&a, &b, &c});
  b.shortage = {.pages_short = 3, .shortages = {{.request = 7, .label = "main", .pages = 3}}};
  const AdmitResult result = runner.admit(step);
  EXPECT_EQ(result.pages_short, 3);
  ASSERT_EQ(result.shortages.size(), 1U);
  EXPECT_EQ(result.shortages[0].request, 7U);
  EXPECT_THAT(take(), ElementsAre("a.admit", "b.admit", "a.abandon"));
  b.shortage = {};
  EXPECT_TRUE(runner.admit(step)) << "the refused step left nothing behind";
}

TEST_F(StepRunnerUnit, ARefusalDropsTheEarlyStepOnlyWhereAnotherResourceHasAdmitted) {
  FakeResource a("a", calls), b("b", calls, {"a"});
  StepRunner runner({&a, &b});
  ASSERT_TRUE(runner.pre_admit(step));
  take();
  a.shortage = {.pages_short = 1, .shortages = {}};
  EXPECT_FALSE(runner.admit(step));
  EXPECT_THAT(take(), ElementsAre("a.admit"));
  runner.pre_plan(step, {});
  take();
  std::swap(a.shortage, b.shortage);
  EXPECT_FALSE(runner.admit(step));
  EXPECT_THAT(take(), ElementsAre("a.admit", "b.admit", "b.clear", "a.clear", "a.abandon"));
  b.shortage = {};
  EXPECT_TRUE(runner.pre_admit(step)) << "none is left";
}

TEST_F(StepRunnerUnit, AThrowInAdmitAbandonsWhatWasAdmitted) {
  FakeResource a("a", calls), b("b", calls, {"a"});
  StepRunner runner({&a, &b});
  b.throws = "admit";
  EXPECT_THROW(runner.admit(step), InvalidState);
  EXPECT_THAT(take(), ElementsAre("a.admit", "b.admit", "a.abandon"));
}

TEST_F(StepRunnerUnit, AThrowInPlanAbandonsTheStepEverywhere) {
  FakeResource a("a", calls), b("b", calls, {"a"});
  StepRunner runner({&a, &b});
  ASSERT_TRUE(runner.admit(step));
  take();
  b.throws = "plan";
  EXPECT_THROW(runner.plan(step), InvalidState);
  EXPECT_THAT(take(),
              ElementsAre("a.plan", "b.plan", "b.clear", "a.clear", "b.abandon", "a.abandon"));
  EXPECT_THROW(runner.results(), InvalidState);
  b.throws = "";
  EXPECT_TRUE(runner.admit(step));
}

TEST_F(StepRunnerUnit, ALeaseThatOneResourceRefusesIsPlannedInNone) {
  FakeResource a("a", calls), b("b", calls, {"a"});
  StepRunner runner({&a, &b});
  b.last_slot = 0;
  ASSERT_TRUE(runner.admit(step));
  take();
  EXPECT_THROW(runner.plan(step, {.slot = 1}), InvalidArgument);
  EXPECT_THAT(take(), ElementsAre("b.clear", "a.clear", "b.abandon", "a.abandon"));
  ASSERT_TRUE(runner.admit(step));
  runner.plan(step);
  ASSERT_TRUE(runner.pre_admit(step));
  take();
  EXPECT_THROW(runner.pre_plan(step, {.slot = 1}), InvalidArgument);
  EXPECT_THAT(take(), ElementsAre("b.clear", "a.clear"));
}

TEST_F(StepRunnerUnit, CallsOutOfOrderAreRefused) {
  FakeResource a("a", calls);
  StepRunner runner({&a});
  EXPECT_THROW(runner.plan(step), InvalidState);
  EXPECT_THROW(runner.commit(), InvalidState);
  EXPECT_THROW(runner.abandon(), InvalidState);
  EXPECT_THROW(runner.results(), InvalidState);
  EXPECT_THROW(runner.pre_plan(step, {}), InvalidState);
  ASSERT_TRUE(runner.admit(step));
  EXPECT_THROW(runner.admit(step), InvalidState);
  EXPECT_THROW(runner.commit(), InvalidState);
  EXPECT_THROW(runner.pre_admit(step), InvalidState) << "its plan may still need pages";
  runner.plan(step);
  ASSERT_TRUE(runner.pre_admit(step));
  EXPECT_THROW(runner.pre_admit(step), InvalidState);
  runner.pre_plan(step, {.slot = 1});
  EXPECT_THROW(runner.pre_plan(step, {.slot = 1}), InvalidState);
}

TEST_F(StepRunnerUnit, AnEarlyStepIsAdmittedAndPlannedWhileTheOtherIsInFlight) {
  FakeResource kv("kv", calls), attention("attention", calls, {"kv"}),
      plain("plain", calls, {}, false);
  StepRunner runner({&kv, &attention, &plain});
  ASSERT_TRUE(runner.admit(step));
  runner.plan(step);
  take();
  ASSERT_TRUE(runner.pre_admit(step));
  EXPECT_THROW(runner.early_results(), InvalidState);
  const PlanResults& early = runner.pre_plan(step, {.slot = 1});
  EXPECT_EQ(&runner.early_results(), &early);
  EXPECT_NE(&runner.results(), &early);
  EXPECT_EQ(attention.seen, 2) << "the early plan of kv";
  EXPECT_THAT(take(), ElementsAre("kv.pre_admit", "attention.pre_admit", "plain.pre_admit",
                                  "kv.pre_plan", "attention.pre_plan"));
  runner.commit();
  ASSERT_TRUE(runner.admit(step));
  runner.plan(step, {.slot = 1});
  EXPECT_THROW(runner.early_results(), InvalidState);
  EXPECT_TRUE(runner.pre_admit(step)) << "the early step was taken over";
}

TEST_F(StepRunnerUnit, ARefusedPreAdmitLeavesNoneBehind) {
  FakeResource a("a", calls), b("b", calls, {"a"});
  StepRunner runner({&a, &b});
  b.shortage = {.pages_short = 1, .shortages = {}};
  EXPECT_EQ(runner.pre_admit(step).pages_short, 1);
  EXPECT_THAT(take(), ElementsAre("a.pre_admit", "b.pre_admit", "b.clear", "a.clear"));
  EXPECT_THROW(runner.pre_plan(step, {}), InvalidState);
}

TEST_F(StepRunnerUnit, AbandonDropsTheEarlyStepToo) {
  FakeResource a("a", calls);
  StepRunner runner({&a});
  ASSERT_TRUE(runner.admit(step));
  runner.plan(step);
  ASSERT_TRUE(runner.pre_admit(step));
  take();
  runner.abandon();
  EXPECT_THAT(take(), ElementsAre("a.clear", "a.abandon"));
  EXPECT_THROW(runner.pre_plan(step, {}), InvalidState);
}

TEST_F(StepRunnerUnit, GraphBuffersAreSizedOnceAtTheLargestShape) {
  FakeResource a("a", calls);
  StepRunner runner({&a});
  const GraphShape shapes[] = {{8, 8, 100}, {2, 64, 10}};
  runner.size_graph_buffers(shapes);
  ASSERT_EQ(a.shapes.size(), 1U);
  EXPECT_EQ(a.shapes[0].num_rows, 8);
  EXPECT_EQ(a.shapes[0].num_tokens, 64);
  EXPECT_EQ(a.shapes[0].num_listed_pages, 100);
  const GraphShape within[] = {{8, 64, 100}};
  runner.size_graph_buffers(within);
  EXPECT_EQ(a.shapes.size(), 1U);
  const GraphShape larger[] = {{9, 1, 1}};
  EXPECT_THROW(runner.size_graph_buffers(larger), InvalidState);
  const GraphShape negative[] = {{1, 1, 1}, {1, -1, 1}};
  EXPECT_THAT(refusal([&] { runner.size_graph_buffers(negative); }),
              HasSubstr("shapes[1].num_tokens"));
  EXPECT_NE(refusal([&] { runner.size_graph_buffers({}); }), "accepted");
}

TEST_F(StepRunnerUnit, OneResourceThatNeedsTwoSlotsIsEnough) {
  FakeResource a("a", calls), b("b", calls);
  StepRunner runner({&a, &b});
  EXPECT_FALSE(runner.force_double_buffer());
  b.double_buffer = true;
  EXPECT_TRUE(runner.force_double_buffer());
  runner.order_replay({});
  EXPECT_THAT(take(), ElementsAre("a.order", "b.order"));
}

TEST(StepUnit, PartsAreFoundByKeyAndKind) {
  Step step;
  step.part<FakeStep>("a");
  EXPECT_EQ(&step.get<FakeStep>("a"), &step.part<FakeStep>("a"));
  EXPECT_THAT(refusal([&] { (void)step.get<FakeStep>("b"); }),
              testing::AllOf(HasSubstr("\"b\""), HasSubstr("FakeStep")));
  EXPECT_THAT(refusal([&] { (void)step.get<OtherStep>("a"); }),
              testing::AllOf(HasSubstr("\"a\""), HasSubstr("OtherStep"), HasSubstr("FakeStep")));
  EXPECT_THAT(refusal([&] { step.part<OtherStep>("a"); }), HasSubstr("OtherStep"));
}

TEST(StepUnit, APartForNoResourceIsRefused) {
  std::vector<std::string> calls;
  FakeResource a("a", calls);
  StepRunner runner({&a});
  Step step;
  step.part<FakeStep>("typo");
  EXPECT_THAT(refusal([&] { runner.admit(step); }), HasSubstr("\"typo\""));
  EXPECT_THAT(refusal([&] { runner.pre_admit(step); }), HasSubstr("\"typo\""));
  EXPECT_TRUE(calls.empty());
}

}  // namespace
}  // namespace mla
