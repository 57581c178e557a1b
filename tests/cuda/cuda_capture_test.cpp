#include <algorithm>
#include <array>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "cases/random.hpp"
#include "cuda/page_numbers.hpp"
#include "device/runtime.hpp"
#include "mla/error.hpp"

// Captured runs of a GPU follow later plans, bit for bit as fresh objects would run them.
namespace mla::cuda {
namespace {

struct Shape {
  const char* name;
  const char* kernel;  // empty: the first that serves it
  Geometry geometry;
  int64_t max_tokens = 128;
  int32_t fewest_queries = 0;  // of a request that has any

  friend void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }
};

constexpr Geometry kDeepSeek{.num_heads = 16,
                             .kv_lora_rank = 512,
                             .qk_rope_head_dim = 64,
                             .page_size = 16,
                             .dtype = DType::kBFloat16,
                             .kv_dtype = DType::kBFloat16};
constexpr Geometry kOdd{.num_heads = 3,
                        .kv_lora_rank = 70,
                        .qk_rope_head_dim = 6,
                        .page_size = 5,
                        .dtype = DType::kFloat32,
                        .kv_dtype = DType::kFloat32};

constexpr Geometry with_pages(int32_t page_size, int32_t num_heads) {
  Geometry geometry = kDeepSeek;
  geometry.page_size = page_size;
  geometry.num_heads = num_heads;
  return geometry;
}

// On Hopper a worker of 128 heads is two blocks, a cluster where the copy engine brings the keys
// (not of pages of 4). With two queries or more in every request, an H200 has teams in three plans
// of four.
const Shape kShapes[] = {
    {"first_choice", "", kDeepSeek},
    {"tensor_core", "cuda_tensor_core", kDeepSeek},
    {"simt", "cuda_simt", kOdd},
    {"pages_of_1", "", with_pages(1, 16)},
    {"pages_of_64_128_heads", "", with_pages(64, 128), 32},
    {"teams_128_heads", "", with_pages(4, 128), 32, 2},
};

/// Host arrays of a batch.
struct HostBatch {
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, kv_indices, kv_len;
  Batch view() const {
    return {
        .qo_indptr = qo_indptr, .kv_indptr = kv_indptr, .kv_indices = kv_indices, .kv_len = kv_len};
  }
  int64_t num_tokens() const { return qo_indptr.back(); }
};

using Bytes = std::vector<std::byte>;

class CudaCapture : public CudaTest, public testing::WithParamInterface<Shape> {
 protected:
  static constexpr int64_t kPages = 500, kMaxListed = 6000;
  static constexpr int32_t kMaxKeys = 700;

  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const int64_t item = size_of(geometry.dtype);
    pool = random_memory(1, kPages * geometry.page_size * geometry.latent_width() * item);
    queries = random_memory(2, max_tokens * geometry.num_heads * geometry.latent_width() * item);
    stream = DeviceStream(kCuda);
  }

  DeviceMemory random_memory(uint64_t seed, int64_t bytes) const {
    Bytes values(static_cast<size_t>(bytes));
    cases::fill_uniform(cases::row_key(seed, 0, 0), geometry.dtype, values.data(),
                        bytes / size_of(geometry.dtype));
    DeviceMemory memory(kCuda, values.size());
    memory.copy_from_host(values.data(), values.size());
    synchronize(kCuda);
    return memory;
  }

  AttentionConfig config(const Bucket& bucket, bool capture) const {
    return {.geometry = geometry,
            .num_pages = kPages,
            .device = kCuda,
            .limits = {.max_rows = bucket.num_rows,
                       .max_tokens = bucket.num_tokens,
                       .max_listed_pages = kMaxListed},
            .bucket = bucket,
            .capture = capture,
            .kernel = GetParam().kernel};
  }

  /// Within the bucket; lengths from 0 to kMaxKeys, the listed pages within their limit.
  HostBatch random_batch(std::mt19937_64& random, const Bucket& bucket) const {
    HostBatch batch;
    const auto num_rows = random() % static_cast<uint64_t>(bucket.num_rows + 1);
    for (uint64_t row = 0; row < num_rows; ++row) {
      const int64_t left = bucket.num_tokens - batch.num_tokens();
      const int64_t fewest = GetParam().fewest_queries;
      const int64_t most = std::min<int64_t>(left, fewest + (row % 8 == 0 ? 20 : 2));
      int64_t queries_of_row = 0;
      if (most >= fewest) {
        queries_of_row =
            fewest + static_cast<int64_t>(random() % static_cast<uint64_t>(most - fewest + 1));
      }
      auto length = static_cast<int32_t>(random() % kMaxKeys);
      if (random() % 5 == 0) length = 0;
      int64_t num_pages = (length + geometry.page_size - 1) / geometry.page_size;
      if (std::ssize(batch.kv_indices) + num_pages > kMaxListed) num_pages = length = 0;
      batch.qo_indptr.push_back(batch.qo_indptr.back() + static_cast<int32_t>(queries_of_row));
      for (int64_t i = 0; i < num_pages; ++i) {
        batch.kv_indices.push_back(static_cast<int32_t>(random() % kPages));
      }
      batch.kv_indptr.push_back(static_cast<int32_t>(batch.kv_indices.size()));
      batch.kv_len.push_back(length);
    }
    return batch;
  }

  /// Output and LSE of one run of `num_tokens` tokens.
  struct Outputs {
    DeviceMemory out, lse;
  };
  Outputs new_outputs() const {
    const int64_t rows = max_tokens * geometry.num_heads;
    return {DeviceMemory(
                kCuda, static_cast<size_t>(rows * geometry.kv_lora_rank * size_of(geometry.dtype))),
            DeviceMemory(kCuda, static_cast<size_t>(rows) * sizeof(float))};
  }
  void spoil(Outputs& outputs) const {
    outputs.out.fill(0xff, stream);
    outputs.lse.fill(0xff, stream);
  }
  RunArgs args(const Outputs& outputs, int64_t num_tokens) const {
    const int64_t heads = geometry.num_heads, rank = geometry.kv_lora_rank;
    const int64_t width = geometry.latent_width();
    const auto q = contiguous_view(static_cast<const void*>(queries.data()),
                                   std::array{num_tokens, heads, width}, geometry.dtype, kCuda);
    const auto cache = contiguous_view(static_cast<const void*>(pool.data()),
                                       std::array{kPages, int64_t{geometry.page_size}, width},
                                       geometry.dtype, kCuda);
    return {.q_nope = columns(q, 0, rank),
            .q_pe = columns(q, rank, geometry.qk_rope_head_dim),
            .cache = split_latent(cache, rank),
            .out = contiguous_view(outputs.out.data(), std::array{num_tokens, heads, rank},
                                   geometry.dtype, kCuda),
            .lse = contiguous_view(static_cast<float*>(outputs.lse.data()),
                                   std::array{num_tokens, heads}, kCuda)};
  }
  /// Both, once the stream is done.
  Bytes read(const Outputs& outputs) const {
    Bytes bytes(outputs.out.bytes() + outputs.lse.bytes());
    outputs.out.copy_to_host(bytes.data(), outputs.out.bytes(), stream);
    outputs.lse.copy_to_host(bytes.data() + outputs.out.bytes(), outputs.lse.bytes(), stream);
    stream.synchronize();
    return bytes;
  }

  struct Captured {
    PagedAttention attention;
    Outputs outputs;
    device::Graph graph{};
    Bucket bucket{};
  };
  /// The first run of all is the captured one.
  Captured capture(const AttentionConfig& with) const {
    Captured captured{PagedAttention(with), new_outputs(), {}, *with.bucket};
    std::mt19937_64 random(3);
    captured.attention.plan(random_batch(random, captured.bucket).view(), {.sm_scale = 0.1F},
                            stream);
    runtime().begin_capture(stream);
    captured.attention.run(args(captured.outputs, captured.bucket.num_tokens), stream);
    captured.graph = runtime().end_capture(stream);
    return captured;
  }
  Bytes replay(Captured& captured, const HostBatch& batch, const PlanOptions& options) const {
    spoil(captured.outputs);
    captured.attention.plan(batch.view(), options, stream);
    captured.attention.order_replay(stream);
    runtime().replay(captured.graph, stream);
    return read(captured.outputs);
  }
  /// The same by an object of its own.
  Bytes run_fresh(const Bucket& bucket, const HostBatch& batch, const PlanOptions& options) const {
    PagedAttention fresh(config(bucket, false));
    Outputs outputs = new_outputs();
    spoil(outputs);
    fresh.plan(batch.view(), options, stream);
    fresh.run(args(outputs, bucket.num_tokens), stream);
    return read(outputs);
  }
  void expect_replans_equal_fresh_runs(int count, const Bucket& bucket) const;
  static device::Runtime& runtime() { return device::runtime_of(kCuda); }

  const Geometry geometry = GetParam().geometry;
  const int64_t max_tokens = GetParam().max_tokens;
  DeviceMemory pool, queries;
  DeviceStream stream{Device{}};  // of the GPU from SetUp on
};

INSTANTIATE_TEST_SUITE_P(, CudaCapture, testing::ValuesIn(kShapes),
                         [](const auto& shape) { return std::string(shape.param.name); });

void CudaCapture::expect_replans_equal_fresh_runs(int count, const Bucket& bucket) const {
  AttentionConfig with = config(bucket, true);
  DeviceMemory scratch(kCuda, PagedAttention::scratch_bytes(with));
  with.scratch = {static_cast<std::byte*>(scratch.data()), scratch.bytes()};
  Captured captured = capture(with);
  std::mt19937_64 random(4);
  for (int round = 0; round < count; ++round) {
    const HostBatch batch = random_batch(random, bucket);
    const PlanOptions options{.sm_scale = 0.1F + 0.001F * static_cast<float>(round),
                              .causal = round % 3 != 0,
                              .lse_base = round % 2 == 0 ? LseBase::kNatural : LseBase::kTwo};
    scratch.fill(0xff, stream);
    const Bytes replayed = replay(captured, batch, options);
    ASSERT_TRUE(replayed == run_fresh(bucket, batch, options)) << "round " << round;
  }
  runtime().destroy_graph(captured.graph);
}

// vllm PR 36611, flashinfer issues 825 and 5015, sglang PR 4557: other lengths, splits, pages, rows
// and query counts than at capture, from one token to many, over scratch that holds NaN.
TEST_P(CudaCapture, TwoHundredReplansEqualFreshRunsBitForBit) {
  expect_replans_equal_fresh_runs(200, {.num_rows = 64, .num_tokens = max_tokens});
}

// For sanitizers that two hundred take too long. Three of the six plans of teams_128_heads have
// teams.
TEST_P(CudaCapture, SixReplansOfFewRowsEqualFreshRunsBitForBit) {
  expect_replans_equal_fresh_runs(6, {.num_rows = 2, .num_tokens = 8});
}

// NVIDIA/TensorRT-LLM PRs 16290 and 16176: nothing that a graph uses is given back.
TEST_P(CudaCapture, ObjectsThatComeAndGoDoNotDisturbAGraph) {
  const Bucket bucket{.num_rows = 8, .num_tokens = 16};
  Captured captured = capture(config(bucket, true));
  std::mt19937_64 random(5);
  const HostBatch batch = random_batch(random, bucket);
  const PlanOptions options{.sm_scale = 0.1F};
  const Bytes expected = replay(captured, batch, options);
  for (int i = 0; i < 200; ++i) {
    const Bucket other{.num_rows = 1 + i % 64, .num_tokens = 1 + i % max_tokens};
    run_fresh(other, random_batch(random, other), options);
  }
  EXPECT_TRUE(replay(captured, batch, options) == expected);
  runtime().destroy_graph(captured.graph);
}

// vllm PR 21691: graphs of many sizes over one workspace.
TEST_P(CudaCapture, BucketsThatShareScratchEqualFreshRuns) {
  std::vector<Bucket> buckets;
  for (const int64_t rows : {64, 33, 16, 8, 2, 1}) {  // engines capture the largest first
    buckets.push_back({.num_rows = rows, .num_tokens = std::min(2 * rows, max_tokens)});
  }
  size_t bytes = 0;
  for (const Bucket& bucket : buckets) {
    bytes = std::max(bytes, PagedAttention::scratch_bytes(config(bucket, true)));
  }
  const DeviceMemory scratch(kCuda, bytes);
  std::vector<Captured> captured;
  for (const Bucket& bucket : buckets) {
    AttentionConfig with = config(bucket, true);
    with.scratch = {static_cast<std::byte*>(scratch.data()), bytes};
    captured.push_back(capture(with));
  }
  std::mt19937_64 random(6);
  for (int round = 0; round < 60; ++round) {
    Captured& bucket = captured[random() % captured.size()];
    const HostBatch batch = random_batch(random, bucket.bucket);
    const PlanOptions options{.sm_scale = 0.2F};
    ASSERT_TRUE(replay(bucket, batch, options) == run_fresh(bucket.bucket, batch, options))
        << "round " << round << ", bucket of " << bucket.bucket.num_rows;
  }
  for (const Captured& bucket : captured) runtime().destroy_graph(bucket.graph);
}

// One plan, many layers: all runs of a capture read the same plan. Few rows, since racecheck sees
// this test too.
TEST_P(CudaCapture, RunsOfOneCaptureShareTheirPlan) {
  const Bucket bucket{.num_rows = 2, .num_tokens = 4};
  PagedAttention attention(config(bucket, true));
  std::array<Outputs, 3> layers = {new_outputs(), new_outputs(), new_outputs()};
  std::mt19937_64 random(7);
  const PlanOptions options{.sm_scale = 0.1F};
  attention.plan(random_batch(random, bucket).view(), options, stream);
  runtime().begin_capture(stream);
  for (const Outputs& layer : layers) attention.run(args(layer, bucket.num_tokens), stream);
  const device::Graph graph = runtime().end_capture(stream);
  for (int round = 0; round < 10; ++round) {
    const HostBatch batch = random_batch(random, bucket);
    for (Outputs& layer : layers) spoil(layer);
    attention.plan(batch.view(), options, stream);
    attention.order_replay(stream);
    runtime().replay(graph, stream);
    const Bytes expected = run_fresh(bucket, batch, options);
    for (const Outputs& layer : layers) ASSERT_TRUE(read(layer) == expected) << "round " << round;
  }
  runtime().destroy_graph(graph);
}

// Replays of one graph on two streams: flashinfer's prims_ts README allows one in flight; here the
// second goes behind the first.
TEST_P(CudaCapture, ReplaysOnTwoStreamsTakeTurns) {
  const Bucket bucket{.num_rows = 8, .num_tokens = 16};
  Captured captured = capture(config(bucket, true));
  const DeviceStream other(kCuda);
  std::mt19937_64 random(8);
  const PlanOptions options{.sm_scale = 0.1F};
  const HostBatch first = random_batch(random, bucket), second = random_batch(random, bucket);
  const Bytes wanted = run_fresh(bucket, second, options);
  spoil(captured.outputs);
  Gate gate;
  gate.close(stream);
  captured.attention.plan(first.view(), options, stream);
  captured.attention.order_replay(stream);
  runtime().replay(captured.graph, stream);
  captured.attention.plan(second.view(), options, other);
  captured.attention.order_replay(other);
  runtime().replay(captured.graph, other);
  gate.open();
  other.synchronize();
  EXPECT_TRUE(read(captured.outputs) == wanted);
  runtime().destroy_graph(captured.graph);
}

TEST_P(CudaCapture, WhatACaptureCannotHoldIsRefusedAndTheContextStaysWell) {
  const Bucket bucket{.num_rows = 8, .num_tokens = 16};
  AttentionConfig without_bucket = config(bucket, true);
  without_bucket.bucket.reset();
  EXPECT_THROW(PagedAttention{without_bucket}, InvalidArgument);
  PagedAttention eager(config(bucket, false));
  const Outputs outputs = new_outputs();
  std::mt19937_64 random(9);
  const HostBatch batch = random_batch(random, bucket);
  const PlanOptions options{.sm_scale = 0.1F};
  eager.plan(batch.view(), options, stream);
  runtime().begin_capture(stream);
  EXPECT_THROW(eager.run(args(outputs, bucket.num_tokens), stream), InvalidState);
  EXPECT_THROW(eager.plan(batch.view(), options, stream), InvalidState);
  runtime().destroy_graph(runtime().end_capture(stream));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  Captured captured = capture(config(bucket, true));
  EXPECT_TRUE(replay(captured, batch, options) == run_fresh(bucket, batch, options));
  runtime().destroy_graph(captured.graph);
}

}  // namespace
}  // namespace mla::cuda
