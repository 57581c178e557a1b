#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "device/graph_device.hpp"
#include "device/runtime.hpp"
#include "engine/mini_engine.hpp"
#include "mla/error.hpp"
#include "mla/graph_runner.hpp"

// Whole steps captured and replayed: appends, attention and the choice of the last rows follow
// later plans, from fixed addresses.
namespace mla::engine {
namespace {

using testing::IsEmpty;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kLatent = MiniEngine::kRank + MiniEngine::kRope, kLayers = 2, kHeads = 2;

struct CapturedEngineUnit : testing::Test {
  static constexpr int64_t kTokens = 16;  // of every bucket
  test::GraphDevice device;
  MiniEngine engine{
      {.num_layers = kLayers, .num_heads = kHeads, .device = device.device(), .capture = true}};
  GraphRunner graphs{engine.runner,
                     {.device = device.device(),
                      .buckets = {{"decode", {.num_rows = 8, .num_tokens = kTokens}}},
                      .max_listed_pages = 64}};
  Stream stream = device.create_stream();

  // What the captured calls read and write.
  struct LayerTensors {
    explicit LayerTensors(Device device)
        : new_rows(device, std::vector<float>(kTokens * kLatent, kNan)),
          out(device, std::vector<float>(kTokens * kHeads * MiniEngine::kRank, kNan)),
          lse(device, std::vector<float>(kTokens * kHeads, kNan)) {}
    test::DeviceArray<float> new_rows, out, lse;
  };
  std::vector<LayerTensors> layers;
  test::DeviceArray<float> query{device.device(), MiniEngine::queries(kTokens, kHeads)};
  test::DeviceArray<float> hidden{device.device(), std::vector<float>(kTokens)};
  test::DeviceArray<float> last{device.device(), std::vector<float>(8)};
  int num_bodies = 0;  // that were captured

  void SetUp() override {
    layers.reserve(kLayers);
    for (int32_t layer = 0; layer < kLayers; ++layer) layers.emplace_back(device.device());
    device.finish_all();
    for (int64_t i = 0; i < kTokens; ++i) hidden.host[i] = static_cast<float>(i);
    hidden.upload(stream);
  }

  void forward(Stream s) {
    ++num_bodies;
    write(s);
    attend(s);
    select(s);
  }
  void write(Stream s) {
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      const LayerTensors& tensors = layers[layer];
      const auto rows = tensors.new_rows.view(std::array<int64_t, 2>{kTokens, kLatent});
      engine.kv.write(layer, "main", columns(rows, 0, MiniEngine::kRank),
                      columns(rows, MiniEngine::kRank, MiniEngine::kRope), s);
    }
  }
  void attend(Stream s) {
    for (int32_t layer = 0; layer < kLayers; ++layer) attend_layer(layers[layer], layer, 0, s);
  }
  void attend_layer(const LayerTensors& tensors, int32_t layer, int32_t pass, Stream s) {
    const auto q = query.view(std::array<int64_t, 3>{kTokens, kHeads, kLatent});
    engine.attention.run(
        {.q_nope = columns(q, 0, MiniEngine::kRank),
         .q_pe = columns(q, MiniEngine::kRank, MiniEngine::kRope),
         .out = tensors.out.view(std::array<int64_t, 3>{kTokens, kHeads, MiniEngine::kRank}),
         .lse = tensors.lse.view(std::array<int64_t, 2>{kTokens, kHeads}),
         .layer = layer,
         .pass = pass},
        s);
  }
  void select(Stream s) {
    engine.attention.select_last_hidden(hidden.view(std::array<int64_t, 2>{kTokens, 1}),
                                        last.view(std::array<int64_t, 2>{8, 1}), "main", 0, s);
  }

  // Puts the planned step's new rows where the captured write reads them.
  void stage_new_rows() {
    const std::vector<RowId> ids = engine.name_new_rows(engine.kv.label_plan());
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      test::DeviceArray<float>& rows = layers[layer].new_rows;
      std::ranges::fill(rows.host, kNan);
      for (size_t i = 0; i < ids.size(); ++i) {
        MiniEngine::fill_row(ids[i], layer, &rows.host[i * kLatent]);
      }
      rows.upload(stream);
    }
  }

  // Runs a planned step and compares with what its streams hold.
  void run(const SlotLease& lease, const std::vector<Segment>& segments) {
    run(segments, [&] { graphs.run(lease, stream, [&](Stream s) { forward(s); }); });
  }
  void run(const std::vector<Segment>& segments, const std::function<void()>& queue_work) {
    if (!segments.empty()) stage_new_rows();
    queue_work();
    for (LayerTensors& tensors : layers) {
      tensors.out.download(stream);
      tensors.lse.download(stream);
    }
    last.download(stream);
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
      engine.expect_output(
          {.num_tokens = kTokens, .out = layers[layer].out.host, .lse = layers[layer].lse.host},
          layer, true, expected);
    }
    EXPECT_EQ(last.host, expected_last);
    EXPECT_THAT(device.violations(), IsEmpty());
  }
  void step(const std::vector<Segment>& segments) {
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
  EXPECT_EQ(num_bodies, 2) << "one for each slot; all else is replayed";
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

TEST_F(CapturedEngineUnit, PiecesAreReplayedWithEagerWorkBetweenThem) {
  for (RequestId request = 1; request <= 2; ++request) engine.kv.open({.request = request});
  const std::vector<Segment> segments = {{.request = 1, .span = 2}, {.request = 2, .span = 1}};
  const Step wanted = MiniEngine::step_of(segments);
  const auto piece = [&](const SlotLease& lease, const char* name,
                         void (CapturedEngineUnit::*work)(Stream)) {
    graphs.run(
        lease, stream,
        [&](Stream s) {
          ++num_bodies;
          (this->*work)(s);
        },
        name);
  };
  for (int n = 0; n < 6; ++n) {
    const SlotLease lease = graphs.lease("decode", 8, kTokens);
    ASSERT_TRUE(engine.runner.admit(wanted));
    engine.runner.plan(wanted, lease, stream);
    run(segments, [&] {
      piece(lease, "write", &CapturedEngineUnit::write);
      attend(stream);
      piece(lease, "select", &CapturedEngineUnit::select);
    });
    EXPECT_TRUE(graphs.is_captured(lease, "write"));
    EXPECT_FALSE(graphs.is_captured(lease));
    engine.commit();
  }
  EXPECT_EQ(num_bodies, 4) << "two pieces for each of the two slots";
}

// What a draft chain needs (mstar-project/mstar PRs 264 and 271): pass i has one query a request
// and sees i + 1 of the three rows that the step appends; two of them are rejected afterwards.
TEST_F(CapturedEngineUnit, ADraftChainOfSeveralPassesIsOneCapturedStep) {
  constexpr int32_t kPasses = 3;
  for (RequestId request = 1; request <= 2; ++request) engine.kv.open({.request = request});
  std::vector<LayerTensors> chain;
  chain.reserve(kPasses);
  for (int32_t pass = 0; pass < kPasses; ++pass) chain.emplace_back(device.device());
  Step wanted = MiniEngine::step_of({{.request = 1, .span = 3}, {.request = 2, .span = 3}});
  std::vector<AttentionPass>& passes = MiniEngine::attention_part(wanted).passes;
  passes.assign(kPasses, {});
  for (int32_t i = 0; i < kPasses; ++i) {
    passes[i].segments.assign(2, {.num_queries = 1, .num_appended = i + 1});
  }
  for (int n = 0; n < 7; ++n) {
    SCOPED_TRACE("step " + std::to_string(n));
    const SlotLease lease = graphs.lease("decode", 8, kTokens);
    ASSERT_TRUE(engine.runner.admit(wanted));
    engine.runner.plan(wanted, lease, stream);
    stage_new_rows();
    graphs.run(lease, stream, [&](Stream s) {
      ++num_bodies;
      write(s);
      for (int32_t pass = 0; pass < kPasses; ++pass) attend_layer(chain[pass], 1, pass, s);
    });
    for (LayerTensors& tensors : chain) {
      tensors.out.download(stream);
      tensors.lse.download(stream);
    }
    device.finish_all();
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      SCOPED_TRACE("pass " + std::to_string(pass));
      std::vector<ExpectedRow> expected;
      for (RequestId request = 1; request <= 2; ++request) {
        std::vector<RowId> keys = engine.rows_with_new({request, "main"});
        keys.resize(keys.size() - static_cast<size_t>(kPasses - 1 - pass));
        expected.push_back({keys, 1});
      }
      engine.expect_output(
          {.num_tokens = kTokens, .out = chain[pass].out.host, .lse = chain[pass].lse.host}, 1,
          true, expected);
    }
    engine.commit();
    const auto rejected = static_cast<RequestId>(1 + n % 2);
    engine.kv.trim({.request = rejected}, 2);
    engine.forget_last({rejected, "main"}, 2);
  }
  EXPECT_EQ(num_bodies, 2) << "one capture for each slot";
  EXPECT_THAT(device.violations(), IsEmpty());
}

// A layer that scatters its rows by itself reads the slots where the captured write does.
TEST_F(CapturedEngineUnit, RowsScatteredBySlotsOfTheResourceFollowLaterPlans) {
  for (RequestId request = 1; request <= 2; ++request) engine.kv.open({.request = request});
  const auto scatter = [&](Stream s) {
    ++num_bodies;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      const auto rows = layers[layer].new_rows.view(std::array<int64_t, 2>{kTokens, kLatent});
      engine.pool.append_at(layer, engine.kv.slots_buf("main", s),
                            columns(rows, 0, MiniEngine::kRank),
                            columns(rows, MiniEngine::kRank, MiniEngine::kRope), s);
    }
    attend(s);
    select(s);
  };
  std::vector<const int64_t*> addresses;
  for (const int32_t span : {5, 1, 3, 1, 7, 2}) {
    const std::vector<Segment> segments = {{.request = 1, .span = span}, {.request = 2, .span = 1}};
    const Step wanted = MiniEngine::step_of(segments);
    const SlotLease lease = graphs.lease("decode", 8, kTokens);
    ASSERT_TRUE(engine.runner.admit(wanted));
    engine.runner.plan(wanted, lease, stream);
    const auto slots = engine.kv.slots_buf("main", stream);
    EXPECT_EQ(slots.shape[0], kTokens);
    addresses.push_back(slots.data);
    run(segments, [&] { graphs.run(lease, stream, scatter); });
    engine.commit();
  }
  EXPECT_EQ(num_bodies, 2) << "one for each slot; all else is replayed";
  EXPECT_NE(addresses[0], addresses[1]) << "each slot has its own";
  for (size_t i = 2; i < addresses.size(); ++i) EXPECT_EQ(addresses[i], addresses[i - 2]);

  const Step eager = MiniEngine::step_of({{.request = 1, .span = 1}});
  EXPECT_THROW(engine.kv.slots_buf(), InvalidState) << "nothing is planned";
  ASSERT_TRUE(engine.runner.admit(eager));
  engine.runner.plan(eager, {}, stream);
  EXPECT_THROW(engine.kv.slots_buf(), InvalidState) << "no bucket: the slots are on the host";
  engine.abandon();
}

// Later plans of up to the bucket's tokens are replayed into the tensors of a capture.
TEST_F(CapturedEngineUnit, ACaptureTakesTheBucketsTokensAlone) {
  engine.kv.open({.request = 1});
  const Step wanted = MiniEngine::step_of({{.request = 1, .span = 2}});
  const auto select = [&](int64_t num_tokens, int64_t num_rows) {
    engine.attention.select_last_hidden(hidden.view(std::array<int64_t, 2>{num_tokens, 1}),
                                        last.view(std::array<int64_t, 2>{num_rows, 1}), "main", 0,
                                        stream);
  };
  const auto write = [&](int64_t num_tokens) {
    const auto rows = layers[0].new_rows.view(std::array<int64_t, 2>{num_tokens, kLatent});
    engine.kv.write(0, "main", columns(rows, 0, MiniEngine::kRank),
                    columns(rows, MiniEngine::kRank, MiniEngine::kRope), stream);
  };
  device::Runtime& runtime = device::runtime_of(device.device());
  ASSERT_TRUE(engine.runner.admit(wanted));
  engine.runner.plan(wanted, graphs.lease("decode", 8, kTokens), stream);
  select(2, 8);
  write(2);
  runtime.begin_capture(stream);
  EXPECT_THROW(select(2, 8), InvalidArgument);
  EXPECT_THROW(write(2), InvalidArgument);
  select(kTokens, 8);
  write(kTokens);
  runtime.destroy_graph(runtime.end_capture(stream));
  engine.abandon();

  ASSERT_TRUE(engine.runner.admit(wanted));
  engine.runner.plan(wanted, {}, stream);
  select(2, 1);
  runtime.begin_capture(stream);
  EXPECT_THROW(select(2, 1), InvalidState) << "no bucket";
  runtime.destroy_graph(runtime.end_capture(stream));
  engine.abandon();
  device.finish_all();
}

TEST_F(CapturedEngineUnit, ReplaysAllocateNothing) {
  engine.kv.open({.request = 1});
  const RecordingDevice* recording = device.recording();
  if (recording == nullptr) GTEST_SKIP() << "only the recording device counts";
  for (int n = 0; n < 4; ++n) step({{.request = 1, .span = 1}});
  const int64_t allocations = recording->num_allocations(), waits = recording->num_host_waits();
  for (int n = 0; n < 8; ++n) step({{.request = 1, .span = 2}});
  EXPECT_EQ(recording->num_allocations(), allocations);
  EXPECT_EQ(recording->num_host_waits(), waits);
}

}  // namespace
}  // namespace mla::engine
