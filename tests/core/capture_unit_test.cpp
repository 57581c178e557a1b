#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device/graph_device.hpp"
#include "device/runtime.hpp"
#include "mla/attention.hpp"
#include "mla/error.hpp"
#include "mla/supports.hpp"

// Plans, runs and captured runs on a device that does its work later.
namespace mla {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr int32_t kHeads = 2, kRank = 4, kPages = 64;
constexpr int32_t kMostHeads = 8, kMostTokens = 9, kMostValues = kMostTokens * kMostHeads * kRank;

// Page p holds one key with the value p, so that a request that sees one page attends to its number
// and one that sees several to their mean.
struct CaptureUnit : testing::Test {
  test::GraphDevice device;
  device::Runtime& runtime = device::runtime_of(device.device());
  Stream stream = device.create_stream();
  test::DeviceArray<float> pool{device.device(), page_numbers()};
  test::DeviceArray<float> q{device.device(), std::vector<float>(kMostValues, 0.0F)};
  test::DeviceArray<float> out{device.device(), std::vector<float>(kMostValues, -1.0F)};

  CaptureUnit() { device.finish_all(); }

  static std::vector<float> page_numbers() {
    std::vector<float> values(kPages * kRank);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i / kRank);
    return values;
  }

  AttentionConfig config() const {
    return {.geometry = {.num_heads = kHeads,
                         .kv_lora_rank = kRank,
                         .qk_rope_head_dim = 0,
                         .page_size = 1,
                         .dtype = DType::kFloat32,
                         .kv_dtype = DType::kFloat32},
            .num_pages = kPages,
            .device = device.device(),
            .limits = {.max_rows = 8, .max_tokens = 8, .max_listed_pages = 512},
            .bucket = Bucket{.num_rows = 8, .num_tokens = 8},
            .capture = true,
            .kernel = test::test_kernel(device.device()),
            .executor = std::make_shared<Executor>(2)};
  }

  RunArgs args(int64_t num_tokens = 8, int64_t num_heads = kHeads) {
    const auto tokens = std::array<int64_t, 3>{num_tokens, num_heads, kRank};
    return {.q_nope = q.view(tokens),
            .cache = split_latent(pool.view(std::array<int64_t, 3>{kPages, 1, kRank}), kRank),
            .out = out.view(tokens)};
  }

  // One query a row; row i sees the pages listed for it.
  static void plan(PagedAttention& attention, const std::vector<std::vector<int32_t>>& pages,
                   Stream stream) {
    std::vector<int32_t> qo = {0}, kv = {0}, indices, len;
    for (const auto& row : pages) {
      qo.push_back(qo.back() + 1);
      kv.push_back(kv.back() + static_cast<int32_t>(row.size()));
      indices.insert(indices.end(), row.begin(), row.end());
      len.push_back(static_cast<int32_t>(row.size()));
    }
    attention.plan({.qo_indptr = qo, .kv_indptr = kv, .kv_indices = indices, .kv_len = len},
                   {.sm_scale = 1}, stream);
  }

  void expect_means(const std::vector<std::vector<int32_t>>& pages, size_t num_tokens = 8,
                    size_t num_heads = kHeads) const {
    for (size_t row = 0; row < num_tokens; ++row) {
      float mean = 0;
      if (row < pages.size()) {
        for (const int32_t page : pages[row]) {
          mean += static_cast<float>(page) / static_cast<float>(pages[row].size());
        }
      }
      for (size_t head = 0; head < num_heads; ++head) {
        EXPECT_NEAR(out.host[(row * num_heads + head) * kRank], mean, 1e-4)
            << "row " << row << ", head " << head;
      }
    }
  }

  // Up to num_rows rows of up to 39 pages.
  static std::vector<std::vector<int32_t>> random_pages(std::mt19937& random, size_t num_rows) {
    std::vector<std::vector<int32_t>> pages(random() % (num_rows + 1));
    for (auto& row : pages) {
      row.resize(random() % 40);
      for (int32_t& page : row) page = static_cast<int32_t>(random() % kPages);
    }
    return pages;
  }
};

TEST_F(CaptureUnit, ReplayFollowsLaterPlans) {  // vllm PR 36611
  PagedAttention attention(config());
  plan(attention, {{1}, {2}}, stream);
  runtime.begin_capture(stream);
  attention.run(args(), stream);  // the first run of all is a capture
  const device::Graph graph = runtime.end_capture(stream);
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const auto pages = random_pages(random, 8);
    plan(attention, pages, stream);
    attention.order_replay(stream);
    runtime.replay(graph, stream);
    out.download(stream);
    device.finish_all(static_cast<uint64_t>(round));
    expect_means(pages);
  }
  EXPECT_THAT(device.violations(), IsEmpty());
  runtime.destroy_graph(graph);
}

// sgl-project/sglang issue 5516: 8 heads, small buckets and one that is no power of two.
TEST_F(CaptureUnit, EightHeadsInBucketsOfAFewRowsFollowLaterPlans) {
  struct Captured {
    int64_t num_rows;
    PagedAttention attention;
    device::Graph graph{};
  };
  std::vector<Captured> captured;
  for (const int64_t num_rows : {9, 8, 4, 2, 1}) {  // engines capture the largest first
    AttentionConfig of_bucket = config();
    of_bucket.geometry.num_heads = kMostHeads;
    of_bucket.limits.max_rows = of_bucket.limits.max_tokens = num_rows;
    of_bucket.bucket = Bucket{.num_rows = num_rows, .num_tokens = num_rows};
    Captured& bucket = captured.emplace_back(num_rows, PagedAttention(of_bucket));
    plan(bucket.attention, {{1}}, stream);
    runtime.begin_capture(stream);
    bucket.attention.run(args(num_rows, kMostHeads), stream);
    bucket.graph = runtime.end_capture(stream);
  }
  std::mt19937 random(2);
  for (uint64_t round = 0; round < 100; ++round) {
    Captured& bucket = captured[random() % captured.size()];
    SCOPED_TRACE("bucket of " + std::to_string(bucket.num_rows));
    const auto pages = random_pages(random, bucket.num_rows);
    std::ranges::fill(out.host, -1.0F);
    out.upload(stream);
    plan(bucket.attention, pages, stream);
    bucket.attention.order_replay(stream);
    runtime.replay(bucket.graph, stream);
    out.download(stream);
    device.finish_all(round);
    expect_means(pages, bucket.num_rows, kMostHeads);
    EXPECT_TRUE(std::all_of(out.host.begin() + bucket.num_rows * kMostHeads * kRank, out.host.end(),
                            [](float value) { return value == -1.0F; }))
        << "written past the bucket";
  }
  EXPECT_THAT(device.violations(), IsEmpty());
  for (const Captured& bucket : captured) runtime.destroy_graph(bucket.graph);
}

TEST_F(CaptureUnit, PlansAheadOfTheDeviceReachTheirOwnReplays) {
  PagedAttention attention(config());
  const Stream planning = device.create_stream();
  const Stream running = device.create_stream();
  plan(attention, {{1}}, planning);
  runtime.begin_capture(running);
  attention.run(args(), running);
  const device::Graph graph = runtime.end_capture(running);
  std::vector<float> seen(20, -1.0F);
  for (int32_t page = 0; page < 20; ++page) {
    plan(attention, {{page}}, planning);
    attention.order_replay(running);
    runtime.replay(graph, running);
    runtime.copy_to_host(&seen[page], out.data(), sizeof(float), running);
  }
  device.finish_all(3);
  for (size_t page = 0; page < seen.size(); ++page) EXPECT_EQ(seen[page], static_cast<float>(page));
  EXPECT_THAT(device.violations(), IsEmpty());
  runtime.destroy_graph(graph);
}

TEST_F(CaptureUnit, RunAndPlanAllocateNothingOnTheDevice) {
  const RecordingDevice* recording = device.recording();
  if (recording == nullptr) GTEST_SKIP() << "only the recording device counts";
  PagedAttention attention(config());
  const int64_t before = recording->num_allocations();
  for (int32_t page = 0; page < 10; ++page) {
    plan(attention, {{page}, {page, page}}, {});
    attention.run(args());
  }
  EXPECT_EQ(recording->num_allocations(), before);
  device.finish_all();
}

TEST_F(CaptureUnit, BuffersKeepTheirAddresses) {
  PagedAttention attention(config());
  plan(attention, {{1}}, {});
  const int32_t* qo = attention.qo_indptr_buf().data;
  const int32_t* len = attention.kv_len_buf().data;
  plan(attention, {{1}, {2}, {3, 4}}, {});
  EXPECT_EQ(attention.qo_indptr_buf().data, qo);
  EXPECT_EQ(attention.kv_len_buf().data, len);
  EXPECT_THAT(test::read_back(attention.kv_len_buf()), ElementsAre(1, 1, 2, 0, 0, 0, 0, 0));
  EXPECT_THAT(test::read_back(attention.qo_indptr_buf()), ElementsAre(0, 1, 2, 3, 3, 3, 3, 3, 3));
}

TEST_F(CaptureUnit, CaptureWithoutABucketOrWithoutAskingIsRefused) {
  AttentionConfig no_bucket = config();
  no_bucket.bucket.reset();
  EXPECT_THROW(PagedAttention{no_bucket}, InvalidArgument);
  AttentionConfig not_asked = config();
  not_asked.capture = false;
  PagedAttention attention(not_asked);
  plan(attention, {{1}}, stream);
  runtime.begin_capture(stream);
  EXPECT_THROW(attention.run(args(), stream), InvalidState);
  runtime.destroy_graph(runtime.end_capture(stream));
}

// A plan of two and a graph of it: a later plan of eight would be replayed into tensors of two.
TEST_F(CaptureUnit, CapturedRunTakesTheBucketsTokensAlone) {
  PagedAttention attention(config());
  plan(attention, {{1}, {2}}, stream);
  runtime.begin_capture(stream);
  EXPECT_THROW(attention.run(args(2), stream), InvalidArgument);
  runtime.destroy_graph(runtime.end_capture(stream));

  plan(attention, {}, stream);
  attention.run(args(0), stream);
  runtime.begin_capture(stream);
  EXPECT_THROW(attention.run(args(0), stream), InvalidArgument);
  attention.run(args(), stream);
  const device::Graph graph = runtime.end_capture(stream);
  plan(attention, {{1}, {2}}, stream);
  attention.run(args(2), stream);  // as planned, outside a capture
  runtime.replay(graph, stream);
  out.download(stream);
  device.finish_all();
  expect_means({{1}, {2}});
  runtime.destroy_graph(graph);
}

TEST_F(CaptureUnit, PlanInsideACaptureIsRefusedAndTheLastOneStays) {
  PagedAttention attention(config());
  plan(attention, {{5}}, stream);
  runtime.begin_capture(stream);
  EXPECT_THROW(plan(attention, {{6}}, stream), InvalidState);
  attention.run(args(), stream);
  const device::Graph graph = runtime.end_capture(stream);
  runtime.replay(graph, stream);
  out.download(stream);
  device.finish_all();
  EXPECT_EQ(out.host[0], 5);
  runtime.destroy_graph(graph);
}

TEST_F(CaptureUnit, SupportsSaysThatItCanBeCaptured) {
  EXPECT_TRUE(supports(config().geometry, device.device()).capturable);
  EXPECT_FALSE(supports(config().geometry, Device{}).capturable);
}

}  // namespace
}  // namespace mla
