#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <vector>

#include "engine/mini_engine.hpp"
#include "mla/graph_runner.hpp"
#include "mla/recording_device.hpp"

// Whole steps captured and replayed on the recording device: appends, attention and the choice of
// the last rows follow later plans, from fixed addresses.
namespace mla::engine {
namespace {

using testing::IsEmpty;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kLatent = MiniEngine::kRank + MiniEngine::kRope, kLayers = 2, kHeads = 2;

struct CapturedEngineUnit : testing::Test {
  static constexpr int64_t kTokens = 16;  // of every bucket
  RecordingDevice device;
  MiniEngine engine{
      {.num_layers = kLayers, .num_heads = kHeads, .device = device.device(), .capture = true}};
  GraphRunner graphs{engine.runner,
                     {.device = device.device(),
                      .buckets = {{"decode", {.num_rows = 8, .num_tokens = kTokens}}},
                      .max_listed_pages = 64}};
  Stream stream = device.create_stream();

  // What the captured calls read and write.
  std::array<std::vector<float>, kLayers> new_rows, out, lse;
  std::vector<float> query = MiniEngine::queries(kTokens, kHeads);
  std::vector<float> hidden = std::vector<float>(kTokens), last = std::vector<float>(8);

  void SetUp() override {
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      new_rows[layer].assign(kTokens * kLatent, kNan);
      out[layer].assign(kTokens * kHeads * MiniEngine::kRank, kNan);
      lse[layer].assign(kTokens * kHeads, kNan);
    }
    for (int64_t i = 0; i < kTokens; ++i) hidden[i] = static_cast<float>(i);
  }

  template <class T, size_t Rank>
  auto view(T* data, const std::array<int64_t, Rank>& shape) {
    return contiguous_view(data, shape, device.device());
  }
  void forward(Stream s) {
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      const auto rows = view(new_rows[layer].data(), std::array<int64_t, 2>{kTokens, kLatent});
      engine.kv.write(layer, "main", columns(rows, 0, MiniEngine::kRank),
                      columns(rows, MiniEngine::kRank, MiniEngine::kRope), s);
      const auto q = view(query.data(), std::array<int64_t, 3>{kTokens, kHeads, kLatent});
      engine.attention.run({.q_nope = columns(q, 0, MiniEngine::kRank),
                            .q_pe = columns(q, MiniEngine::kRank, MiniEngine::kRope),
                            .out = view(out[layer].data(),
                                        std::array<int64_t, 3>{kTokens, kHeads, MiniEngine::kRank}),
                            .lse = view(lse[layer].data(), std::array<int64_t, 2>{kTokens, kHeads}),
                            .layer = layer},
                           s);
    }
    engine.attention.select_last_hidden(view(hidden.data(), std::array<int64_t, 2>{kTokens, 1}),
                                        view(last.data(), std::array<int64_t, 2>{8, 1}), "main", 0,
                                        s);
  }

  // Runs a planned step and compares with what its streams hold.
  void run(const SlotLease& lease, const std::vector<Segment>& segments) {
    std::vector<RowId> ids;
    if (!segments.empty()) ids = engine.name_new_rows(engine.kv.label_plan());
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      std::fill(new_rows[layer].begin(), new_rows[layer].end(), kNan);
      for (size_t i = 0; i < ids.size(); ++i) {
        MiniEngine::fill_row(ids[i], layer, &new_rows[layer][i * kLatent]);
      }
    }
    graphs.run(lease, stream, [&](Stream s) { forward(s); });
    device.finish_all();
    std::vector<ExpectedRow> expected;
    std::vector<float> expected_last(8, 0.0F);
    float token = 0;
    for (size_t i = 0; i < segments.size(); ++i) {
      expected.push_back({engine.rows_with_new({segments[i].request, "main"}), segments[i].span});
      token += static_cast<float>(segments[i].span);
      if (segments[i].span > 0) expected_last[i] = token - 1;
    }
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      SCOPED_TRACE("layer " + std::to_string(layer));
      engine.expect_output({.num_tokens = kTokens, .out = out[layer], .lse = lse[layer]}, layer,
                           true, expected);
    }
    EXPECT_EQ(last, expected_last);
    EXPECT_THAT(device.violations(), IsEmpty());
  }
  void step(std::vector<Segment> segments) {
    const Step wanted = MiniEngine::step_of(segments);
    const SlotLease lease = graphs.lease("decode", 8, kTokens);
    ASSERT_TRUE(engine.runner.admit(wanted));
    engine.runner.plan(wanted, lease, stream);
    run(lease, segments);
    engine.commit();
  }
};

// vllm-project/vllm PR 36611, sgl-project/sglang PR 4557, flashinfer-ai/flashinfer issue 5015.
TEST_F(CapturedEngineUnit, ReplaysFollowOtherLengthsPagesAndRowCounts) {
  for (RequestId request = 1; request <= 3; ++request) engine.kv.open({.request = request});
  step({{.request = 1, .span = 9}, {.request = 2, .span = 1}});
  step({{.request = 1, .span = 1}, {.request = 2, .span = 1}, {.request = 3, .span = 14}});
  step({{.request = 3, .span = 4}});
  step({{.request = 2, .span = 4}, {.request = 1, .span = 0}, {.request = 3, .span = 1}});
  engine.kv.remove(1);
  step({{.request = 2, .span = 16}});
  step({});  // the replayed writes go nowhere
  step({});
  step({{.request = 3, .span = 1}, {.request = 2, .span = 1}});
  EXPECT_EQ(std::ranges::count(device.calls(), "replay"), 8);
  EXPECT_EQ(std::ranges::count(device.calls(), "begin capture"), 2) << "one for each slot";
}

// flashinfer code reading: a re-plan must not change what a captured graph launches.
TEST_F(CapturedEngineUnit, OneQueryARowAtCaptureAndEightAtReplay) {
  engine.kv.open({.request = 1});
  engine.kv.open({.request = 2});
  for (int n = 0; n < 2; ++n) step({{.request = 1, .span = 1}, {.request = 2, .span = 1}});
  for (int n = 0; n < 2; ++n) step({{.request = 1, .span = 8}, {.request = 2, .span = 8}});
}

TEST_F(CapturedEngineUnit, ACapturedStepIsPlannedWhileTheOtherSlotRuns) {
  engine.kv.open({.request = 1});
  engine.kv.open({.request = 2});
  const std::vector<Segment> segments = {{.request = 1, .span = 3}, {.request = 2, .span = 2}};
  const Step wanted = MiniEngine::step_of(segments);
  SlotLease lease = graphs.lease("decode", 8, kTokens);
  ASSERT_TRUE(engine.runner.admit(wanted));
  engine.runner.plan(wanted, lease, stream);
  for (int n = 0; n < 6; ++n) {
    const SlotLease next = graphs.lease("decode", 8, kTokens);
    ASSERT_NE(next.slot, lease.slot);
    ASSERT_TRUE(engine.runner.pre_admit(wanted));
    const uint64_t early =
        engine.runner.pre_plan(wanted, next, stream).get<AttentionPlan>("attention").id;
    run(lease, segments);
    engine.commit();
    ASSERT_TRUE(engine.runner.admit(wanted));
    EXPECT_EQ(engine.runner.plan(wanted, next, stream).get<AttentionPlan>("attention").id, early);
    lease = next;
  }
}

TEST_F(CapturedEngineUnit, ReplaysAllocateNothing) {
  engine.kv.open({.request = 1});
  for (int n = 0; n < 4; ++n) step({{.request = 1, .span = 1}});
  const int64_t allocations = device.num_allocations(), waits = device.num_host_waits();
  for (int n = 0; n < 8; ++n) step({{.request = 1, .span = 2}});
  EXPECT_EQ(device.num_allocations(), allocations);
  EXPECT_EQ(device.num_host_waits(), waits);
}

}  // namespace
}  // namespace mla::engine
