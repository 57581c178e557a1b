#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "engine/two_requests.hpp"

// One test for each entry of the surface that a serving engine's MLA resource has: what it means,
// not only that it is there.
namespace mla::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
const StreamName kOne{1, "main"}, kTwo{2, "main"};

struct SeedSurfaceUnit : TwoRequests {
  const Step both = MiniEngine::step_of({{.request = 1, .span = 3}, {.request = 2, .span = 1}});

  void plan(const Step& step, const SlotLease& where = {}) {
    ASSERT_TRUE(runner.admit(step));
    runner.plan(step, where);
    engine.write_new_rows();
  }
  const PagedAttention* object(std::string_view label) const {
    for (const auto& entry : runner.results().get<AttentionPlan>("attention").entries) {
      if (entry.label == label) return entry.attention;
    }
    return nullptr;
  }
};

// A PagedAttention over the engine's pool, by itself.
AttentionConfig wrapper_config(const LatentPool& pool) {
  const Device device = pool.config().device;
  return {.geometry = AttentionResource::geometry_of(pool, 2),
          .num_pages = pool.total_pages(),
          .device = device,
          .limits = {.max_rows = 8, .max_tokens = 32, .max_listed_pages = 64},
          .kernel = test::test_kernel(device),
          .executor = std::make_shared<Executor>(1)};
}

TEST_F(SeedSurfaceUnit, SupportsIsTrueForEveryShapeAndSaysWhichKernelAndWhy) {
  Geometry geometry = AttentionResource::geometry_of(engine.pool, 16);
  for (const auto& [rank, rope] : {std::pair{512, 64}, {512, 0}, {576, 64}, {16, 8}, {7, 3}}) {
    geometry.kv_lora_rank = rank;
    geometry.qk_rope_head_dim = rope;
    const Support support = supports(geometry, test::test_device());
    EXPECT_TRUE(support) << rank << " + " << rope;
    EXPECT_FALSE(support.kernel.empty());
    EXPECT_FALSE(support.reason.empty());
    EXPECT_EQ(support.capturable, test::test_device() != Device{}) << "a CPU has no graphs";
  }
  geometry.num_heads = 0;
  EXPECT_FALSE(supports(geometry, test::test_device()));
  EXPECT_THAT(supports(geometry, test::test_device()).reason, HasSubstr("num_heads"));
}

TEST_F(SeedSurfaceUnit, WrapperInGraphModeKeepsItsRowsAndAddressesForLife) {
  AttentionConfig config = wrapper_config(engine.pool);
  config.bucket = Bucket{.num_rows = 3, .num_tokens = 4};
  PagedAttention wrapper(config);
  const std::array<int32_t, 2> qo = {0, 1}, indptr = {0, 1};
  const std::array<int32_t, 1> page = {0}, len = {3};
  wrapper.plan({.qo_indptr = qo,
                .kv_indptr = indptr,
                .kv_indices = page,
                .kv_len = len,
                .kv_last_page_len = {}},
               {.sm_scale = 1});
  const int32_t* qo_address = wrapper.qo_indptr_buf().data;
  const int32_t* len_address = wrapper.kv_len_buf().data;
  const std::array<int32_t, 3> qo2 = {0, 2, 4}, indptr2 = {0, 1, 2};
  const std::array<int32_t, 2> pages2 = {0, 1}, len2 = {4, 1};
  wrapper.plan({.qo_indptr = qo2,
                .kv_indptr = indptr2,
                .kv_indices = pages2,
                .kv_len = len2,
                .kv_last_page_len = {}},
               {.sm_scale = 1});
  EXPECT_EQ(wrapper.qo_indptr_buf().shape[0], 4);
  EXPECT_EQ(wrapper.qo_indptr_buf().data, qo_address);
  EXPECT_EQ(wrapper.kv_len_buf().data, len_address);
}

TEST_F(SeedSurfaceUnit, WrapperPlanTakesLastPageLengthsOrLengths) {
  const std::array<int32_t, 4> qo = {0, 1, 1, 2}, indptr = {0, 2, 2, 3};
  const std::array<int32_t, 3> pages = {5, 2, 7}, last = {3, 0, 4}, len = {7, 0, 4};
  const auto planned = [&](bool by_last_page) {
    PagedAttention wrapper(wrapper_config(engine.pool));
    Batch batch{.qo_indptr = qo,
                .kv_indptr = indptr,
                .kv_indices = pages,
                .kv_len = {},
                .kv_last_page_len = {}};
    (by_last_page ? batch.kv_last_page_len : batch.kv_len) = by_last_page ? last : len;
    wrapper.plan(batch, {.sm_scale = 1, .causal = false});
    return test::read_back(wrapper.kv_len_buf());
  };
  EXPECT_THAT(planned(true), ElementsAre(7, 0, 4));
  EXPECT_EQ(planned(true), planned(false));
}

TEST_F(SeedSurfaceUnit, WrapperRunTakesALayerOfThePoolOrTwoViews) {
  plan(both);
  const auto joined = engine.attend("main", 0, 1);
  // The same rows in two tensors of their own.
  const int64_t pages = engine.pool.total_pages();
  const Device device = test::test_device();
  std::vector<int64_t> slots(pages * 4);
  std::iota(slots.begin(), slots.end(), 0);
  test::DeviceArray<float> layer(device, std::vector<float>(pages * 4 * 12));
  engine.pool.gather(1, slots, layer.view(std::array<int64_t, 2>{pages * 4, 12}));
  layer.read();
  std::vector<float> ckv_rows(pages * 4 * 8), kpe_rows(pages * 4 * 4);
  for (int64_t row = 0; row < pages * 4; ++row) {
    std::copy_n(&layer.host[row * 12], 8, &ckv_rows[row * 8]);
    std::copy_n(&layer.host[row * 12 + 8], 4, &kpe_rows[row * 4]);
  }
  const test::DeviceArray<float> ckv(device, ckv_rows), kpe(device, kpe_rows);
  AttentionConfig config = wrapper_config(engine.pool);
  config.strides = CacheStrides{.ckv_page = 32, .ckv_row = 8, .kpe_page = 16, .kpe_row = 4};
  PagedAttention wrapper(config);
  wrapper.plan(kv.label_plan().batch(), {.sm_scale = MiniEngine::kScale});
  const test::DeviceArray<float> q(device, MiniEngine::queries(4, 2));
  const auto query = q.view(std::array<int64_t, 3>{4, 2, 12});
  test::DeviceArray<float> out(device, std::vector<float>(4 * 2 * 8, kNan));
  wrapper.run({.q_nope = columns(query, 0, 8),
               .q_pe = columns(query, 8, 4),
               .cache = {.ckv = ckv.view(std::array<int64_t, 3>{pages, 4, 8}),
                         .kpe = kpe.view(std::array<int64_t, 3>{pages, 4, 4})},
               .out = out.view(std::array<int64_t, 3>{4, 2, 8})});
  EXPECT_EQ(out.read(), joined.out);
}

TEST_F(SeedSurfaceUnit, UnderALeaseTMayBeTheBucketsTokens) {
  plan(both, lease(0, 4, 8));
  EXPECT_EQ(engine.attend("main", 0, 0, 4).num_tokens, 4) << "the plan's";
  EXPECT_EQ(engine.attend("main", 0, 0, 8).num_tokens, 8) << "the bucket's";
  EXPECT_THROW(engine.attend("main", 0, 0, 5), InvalidArgument);
}

TEST_F(SeedSurfaceUnit, ManagerRefusesAnotherCacheAMissingScaleAndMissingHeads) {
  const AttentionOptions good{.geometry = AttentionResource::geometry_of(engine.pool, 2),
                              .sm_scale = 0.1F,
                              .kernel = test::test_kernel(test::test_device())};
  const auto refused = [&](const std::function<void(AttentionOptions&)>& change) {
    AttentionOptions options = good;
    change(options);
    return refusal([&] { AttentionResource(engine.pool, "kv", options); });
  };
  EXPECT_EQ(refused([](AttentionOptions&) {}), "accepted");
  EXPECT_THAT(refused([](AttentionOptions& o) { o.sm_scale = kNan; }),
              testing::AllOf(HasSubstr("sm_scale"), HasSubstr("no default")));
  EXPECT_THAT(refused([](AttentionOptions& o) { o.sm_scale = 0; }), HasSubstr("sm_scale"));
  EXPECT_THAT(refused([](AttentionOptions& o) { o.sm_scale = -1; }), HasSubstr("sm_scale"));
  EXPECT_THAT(refused([](AttentionOptions& o) { o.geometry.num_heads = 0; }),
              HasSubstr("num_heads"));
  EXPECT_THAT(refused([](AttentionOptions& o) { o.geometry.num_heads = 1025; }),
              HasSubstr("num_heads"));
  EXPECT_THAT(refused([](AttentionOptions& o) { o.geometry.kv_lora_rank = 9; }),
              testing::AllOf(HasSubstr("kv_lora_rank"), HasSubstr("8, the pool's")));
  EXPECT_THAT(refused([](AttentionOptions& o) { o.geometry.qk_rope_head_dim = 0; }),
              HasSubstr("qk_rope_head_dim"));
  EXPECT_THAT(refused([](AttentionOptions& o) { o.geometry.page_size = 16; }),
              HasSubstr("page_size"));
  EXPECT_THAT(refused([](AttentionOptions& o) { o.geometry.kv_dtype = DType::kBFloat16; }),
              testing::AllOf(HasSubstr("kv_dtype"), HasSubstr("fp32")));
  EXPECT_THAT(refused([](AttentionOptions& o) { o.geometry.dtype = DType::kBFloat16; }),
              HasSubstr("dtype"));
  EXPECT_THAT(refused([](AttentionOptions& o) { o.kernel = "none such"; }), HasSubstr("none such"));
  if (test::test_device() != Device{}) return;
  EXPECT_THAT(refused([](AttentionOptions& o) { o.capture = true; }), HasSubstr("capture"));
}

TEST_F(SeedSurfaceUnit, ManagerDependsOnTheKvResourceWhichIsPlannedFirst) {
  EXPECT_THAT(attention.depends_on(), ElementsAre("kv"));
  StepRunner reversed({&attention, &kv});
  EXPECT_THAT(reversed.order(), ElementsAre(&kv, &attention));
}

TEST_F(SeedSurfaceUnit, PlanKeepsOneObjectForEachBucketSlotAndLabel) {
  kv.open({.request = 1, .label = "draft"});
  const Step step =
      MiniEngine::step_of({{.request = 1, .span = 1}, {.request = 1, .label = "draft", .span = 1}});
  const std::vector<SlotLease> leases = {
      {.slot = 0},    {.slot = 1},    lease(0, 4, 4),          lease(1, 4, 4),
      lease(0, 4, 8), lease(0, 2, 4), lease(0, 4, 4, "verify")};
  std::vector<const PagedAttention*> objects;
  for (const SlotLease& where : leases) {
    plan(step, where);
    objects.push_back(object("main"));
    objects.push_back(object("draft"));
    engine.commit();
  }
  EXPECT_EQ(std::set(objects.begin(), objects.end()).size(), objects.size());
  for (size_t i = 0; i < leases.size(); ++i) {
    plan(step, leases[i]);
    EXPECT_EQ(object("main"), objects[2 * i]) << "kept for the resource's life";
    EXPECT_EQ(object("draft"), objects[2 * i + 1]);
    engine.commit();
  }
}

TEST_F(SeedSurfaceUnit, CausalComesFromTheStep) {
  for (const bool causal : {true, false}) {
    Step step = MiniEngine::step_of({{.request = 1, .span = 3}});
    MiniEngine::attention_part(step).passes[0].causal = causal;
    plan(step);
    engine.expect_attends("main", 0, causal, {{engine.rows_with_new(kOne), 3}});
    engine.abandon();
  }
}

TEST_F(SeedSurfaceUnit, ContextOnlyPlansSeeTheStoredContextWithCountsOfTheirOwn) {
  Step step = MiniEngine::step_of({{.request = 1, .span = 3}, {.request = 2, .span = 1}});
  MiniEngine::attention_part(step).passes = {
      {.context_only = true, .segments = {{.num_queries = 1}, {.num_queries = 4}}}};
  plan(step);
  engine.expect_attends("main", 0, false, {{engine.rows(kOne), 1}, {engine.rows(kTwo), 4}});
  engine.abandon();
  MiniEngine::attention_part(step).passes[0].segments.pop_back();
  ASSERT_TRUE(runner.admit(step));
  EXPECT_THAT(refusal([&] { runner.plan(step); }), HasSubstr("as many as the KV plan has rows"));
}

TEST_F(SeedSurfaceUnit, PrePlanIsPromotedByTheNextPlanOfTheSameStepAndLease) {
  EXPECT_TRUE(attention.supports_preplan());
  const Step next = MiniEngine::step_of({{.request = 1, .span = 1}});
  plan(both, lease(0, 4, 8));
  ASSERT_TRUE(runner.pre_admit(next));
  const uint64_t early = runner.pre_plan(next, lease(1, 4, 8)).get<AttentionPlan>("attention").id;
  engine.commit();
  ASSERT_TRUE(runner.admit(next));
  EXPECT_EQ(runner.plan(next, lease(1, 4, 8)).get<AttentionPlan>("attention").id, early);
}

TEST_F(SeedSurfaceUnit, ClearPreplanDropsIt) {
  const Step next = MiniEngine::step_of({{.request = 1, .span = 1}});
  plan(both, lease(0, 4, 8));
  const PageCounts before = kv.check();
  ASSERT_TRUE(runner.pre_admit(next));
  const uint64_t early = runner.pre_plan(next, lease(1, 4, 8)).get<AttentionPlan>("attention").id;
  runner.clear_preplan();
  EXPECT_EQ(kv.check(), before);
  engine.commit();
  ASSERT_TRUE(runner.admit(next));
  EXPECT_NE(runner.plan(next, lease(1, 4, 8)).get<AttentionPlan>("attention").id, early);
}

TEST_F(SeedSurfaceUnit, NoDoubleBufferIsForcedSinceStagingCannotRace) {
  EXPECT_FALSE(attention.force_double_buffer());
  EXPECT_FALSE(runner.force_double_buffer());
}

TEST_F(SeedSurfaceUnit, RunTakesLabelAndLayerFromTheCursorThatPlanResets) {
  kv.open({.request = 1, .label = "draft"});
  const Step step =
      MiniEngine::step_of({{.request = 1, .span = 1}, {.request = 1, .label = "draft", .span = 1}});
  const auto run = [&] {
    const test::DeviceArray<float> q(test::test_device(), MiniEngine::queries(1, 2));
    const auto query = q.view(std::array<int64_t, 3>{1, 2, 12});
    test::DeviceArray<float> out(test::test_device(), std::vector<float>(16, kNan));
    attention.run({.q_nope = columns(query, 0, 8),
                   .q_pe = columns(query, 8, 4),
                   .out = out.view(std::array<int64_t, 3>{1, 2, 8})});
    return out.read();
  };
  EXPECT_THROW(MiniEngine().attention.set_cursor("main", 0), InvalidState) << "no plan yet";
  plan(step);
  EXPECT_EQ(run(), engine.attend("main", 0, 0).out);
  attention.set_cursor("draft", 1);
  EXPECT_EQ(run(), engine.attend("draft", 0, 1).out);
  EXPECT_NE(run(), engine.attend("draft", 0, 0).out);
  EXPECT_THAT(refusal([&] { attention.set_cursor("guidance", 0); }), HasSubstr("\"guidance\""));
  for (const int32_t layer : {-1, 2}) {
    EXPECT_THAT(refusal([&] { attention.set_cursor("main", layer); }),
                HasSubstr("layer: expected 0 to 1, got " + std::to_string(layer)));
  }
  EXPECT_EQ(run(), engine.attend("draft", 0, 1).out) << "a refused cursor changes nothing";
  engine.commit();
  plan(step);
  EXPECT_EQ(run(), engine.attend("main", 0, 0).out);
}

TEST_F(SeedSurfaceUnit, BuffersAreTheCurrentPlansAndKeepTheirAddressUnderALease) {
  EXPECT_EQ(engine.qo_indptr("main"), (std::vector<int32_t>{0, 6, 9})) << "of the step before";
  EXPECT_THROW(MiniEngine().attention.kv_len_buf(), InvalidState);
  plan(both, lease(0, 3, 8));
  EXPECT_THAT(engine.qo_indptr("main"), ElementsAre(0, 3, 4, 4));
  EXPECT_THAT(engine.kv_len("main"), ElementsAre(9, 4, 0));
  const int32_t* qo = attention.qo_indptr_buf().data;
  const int32_t* len = attention.kv_len_buf().data;
  engine.commit();
  Step context = MiniEngine::step_of({{.request = 1, .span = 1}, {.request = 2, .span = 1}});
  MiniEngine::attention_part(context).passes = {
      {.context_only = true, .segments = {{.num_queries = 2}, {.num_queries = 1}}}};
  plan(context, lease(0, 3, 8));
  EXPECT_THAT(engine.qo_indptr("main"), ElementsAre(0, 2, 3, 3));
  EXPECT_THAT(engine.kv_len("main"), ElementsAre(9, 4, 0)) << "where the appended rows start";
  EXPECT_EQ(attention.qo_indptr_buf().data, qo);
  EXPECT_EQ(attention.kv_len_buf().data, len);
}

TEST_F(SeedSurfaceUnit, SelectLastHiddenTakesEachRequestsLastRowAndZerosWithoutQueries) {
  kv.open({.request = 3});
  plan(MiniEngine::step_of(
           {{.request = 1, .span = 3}, {.request = 3, .span = 0}, {.request = 2, .span = 1}}),
       lease(0, 5, 8));
  std::vector<float> values(8 * 4, kNan);
  for (int64_t token = 0; token < 4; ++token) {
    for (int64_t c = 0; c < 3; ++c) values[token * 4 + c] = static_cast<float>(10 * token + c);
  }
  const Device device = test::test_device();
  const test::DeviceArray<float> hidden(device, values);
  test::DeviceArray<float> out(device, std::vector<float>(5 * 3, kNan));
  const TensorView<const float, 2> rows{
      .data = hidden.data(), .shape = {8, 3}, .stride = {4, 1}, .device = device};
  const auto result = out.view(std::array<int64_t, 2>{5, 3});
  attention.select_last_hidden(rows, result);
  EXPECT_THAT(out.read(), ElementsAre(20, 21, 22, 0, 0, 0, 30, 31, 32, 0, 0, 0, 0, 0, 0));
  TensorView<const float, 2> live = rows;
  live.shape[0] = 4;
  attention.select_last_hidden(live, result);
  live.shape[0] = 5;
  EXPECT_THAT(refusal([&] { attention.select_last_hidden(live, result); }),
              testing::AllOf(HasSubstr("hidden.shape[0]"), HasSubstr("4"), HasSubstr("8")));
  const auto narrow = out.view(std::array<int64_t, 2>{4, 3});
  EXPECT_THAT(refusal([&] { attention.select_last_hidden(rows, narrow); }),
              testing::AllOf(HasSubstr("out.shape"), HasSubstr("[5, 3]")));
  ConstTensor<2> negative = rows;
  negative.shape[1] = -3;
  EXPECT_THAT(refusal([&] { attention.select_last_hidden(negative, result); }),
              HasSubstr("hidden.shape"));
  ConstTensor<2> unknown = rows;
  unknown.dtype = static_cast<DType>(9);
  EXPECT_THAT(refusal([&] { attention.select_last_hidden(unknown, result); }),
              testing::AllOf(HasSubstr("hidden.dtype"), HasSubstr("9")));
  TensorView<const float, 2> same = rows;
  same.data = out.data();
  EXPECT_THAT(refusal([&] { attention.select_last_hidden(same, result); }),
              HasSubstr("out: expected memory apart from that of hidden"));
}

TEST_F(SeedSurfaceUnit, UsesKernelIsFalseOnlyWhereTheReferenceServes) {
  EXPECT_EQ(attention.kernel() == "reference", test::test_device() == Device{}) << "as asked for";
  EXPECT_EQ(attention.uses_kernel(), attention.kernel() != "reference");
  const AttentionResource fast(
      engine.pool, "kv",
      {.geometry = AttentionResource::geometry_of(engine.pool, 2), .sm_scale = 1});
  EXPECT_EQ(fast.uses_kernel(),
            supports(AttentionResource::geometry_of(engine.pool, 2), test::test_device()).kernel !=
                "reference");
}

}  // namespace
}  // namespace mla::engine
