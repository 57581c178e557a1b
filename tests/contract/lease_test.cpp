#include "cases/problem.hpp"
#include "contract/contract.hpp"

// What a lease (a bucket of fixed rows and tokens) promises, apart from the capture itself.
namespace mla::contract {
namespace {

using cases::Problem;

MLA_CONTRACT_SUITE(LeaseContract);

std::vector<int32_t> ones(size_t count) { return std::vector<int32_t>(count, 1); }

// One object of a bucket that takes plan after plan, each against a fresh object of its own.
class Lease {
 public:
  explicit Lease(const AttentionCase& largest)
      : attention_([&] {
          AttentionConfig config = Problem::config_of(largest);
          config.limits.max_listed_pages = 400;
          return config;
        }()) {}

  void expect_equals_fresh_object(const AttentionCase& c) {
    const CheckReport fresh = cases::check_case(c, {.max_rows = 64});
    ASSERT_EQ(fresh.fault, "") << c.name;
    Problem problem(c);
    attention_.plan(problem.batch(), Problem::options_of(c));
    problem.run(attention_);
    EXPECT_EQ(problem.packed_out(), fresh.out) << c.name;
    EXPECT_EQ(problem.packed_lse(), fresh.lse) << c.name;
    EXPECT_EQ(problem.find_stray_write(), "") << c.name;
  }

  PagedAttention& attention() { return attention_; }

 private:
  PagedAttention attention_;
};

// vllm-project/vllm PR 36611: a later plan's lengths met the captured schedule.
TEST_P(LeaseContract, LaterPlansOfOtherLengthsEqualFreshOnes) {
  AttentionCase c{.name = "captured",
                  .q_lens = ones(8),
                  .kv_lens = std::vector<int32_t>(8, 64),
                  .pool_pages = 120,
                  .bucket = Bucket{.num_rows = 8, .num_tokens = 8},
                  .kernel = GetParam(),
                  .device = device()};
  c.geometry.num_heads = 2;
  Lease lease(c);
  lease.expect_equals_fresh_object(c);
  c.name = "re-planned";
  c.kv_lens = {5000, 1, 64, 65, 63, 0, 700, 2};
  lease.expect_equals_fresh_object(c);
  c.name = "shorter again";
  c.kv_lens = {3, 1, 0, 0, 9, 0, 70, 2};
  lease.expect_equals_fresh_object(c);
}

// sgl-project/sglang PR 4557: host arrays of the live batch, not of the padded one.
TEST_P(LeaseContract, MissingRowsOfABucketAreEmpty) {
  AttentionCase c{.q_lens = ones(5),
                  .kv_lens = {12, 70, 1, 0, 30},
                  .bucket = Bucket{.num_rows = 8, .num_tokens = 8}};
  const CheckReport report = expect_holds(c);
  EXPECT_EQ(report.plan.num_rows, 8);
  EXPECT_EQ(report.out.size(), size_t{8} * 16 * 512);
}

// flashinfer-ai/flashinfer issue 5015: a padded multi-token batch hung.
TEST_P(LeaseContract, PaddedMultiTokenRowsAreEmpty) {
  AttentionCase c{.name = "rows missing",
                  .q_lens = {4, 4, 4, 4, 4},
                  .kv_lens = {9, 64, 65, 4, 200},
                  .causal = true,
                  .bucket = Bucket{.num_rows = 8, .num_tokens = 32}};
  c.geometry.num_heads = 3;
  expect_holds(c);
  c.name = "rows of four queries without keys";
  c.q_lens = {4, 4, 4, 4, 4, 4, 4, 4};
  c.kv_lens = {9, 64, 65, 4, 200, 0, 0, 0};
  expect_holds(c);
}

// flashinfer, MLAPlan: the launch shape depended on the batch's average rows.
TEST_P(LeaseContract, OneTokenAndManyTokenPlansShareABucket) {
  AttentionCase c{.name = "one token",
                  .q_lens = ones(8),
                  .kv_lens = std::vector<int32_t>(8, 90),
                  .causal = true,
                  .pool_pages = 120,
                  .bucket = Bucket{.num_rows = 8, .num_tokens = 64},
                  .kernel = GetParam(),
                  .device = device()};
  c.geometry.num_heads = 4;
  Lease lease(c);
  lease.expect_equals_fresh_object(c);
  c.name = "eight tokens";
  c.q_lens = std::vector<int32_t>(8, 8);
  lease.expect_equals_fresh_object(c);
  c.name = "one request with all tokens";
  c.q_lens = {64};
  c.kv_lens = {100};
  lease.expect_equals_fresh_object(c);
}

TEST_P(LeaseContract, IndexBuffersKeepTheirAddressesAndHoldTheBucketsRows) {
  AttentionCase c{.q_lens = ones(3),
                  .kv_lens = {7, 0, 65},
                  .pool_pages = 20,
                  .bucket = Bucket{.num_rows = 4, .num_tokens = 6},
                  .kernel = GetParam(),
                  .device = device()};
  c.geometry.num_heads = 1;
  Lease lease(c);
  lease.expect_equals_fresh_object(c);
  const auto qo = lease.attention().qo_indptr_buf();
  const auto len = lease.attention().kv_len_buf();
  EXPECT_EQ(read_back(qo), (std::vector<int32_t>{0, 1, 2, 3, 3}));
  EXPECT_EQ(read_back(len), (std::vector<int32_t>{7, 0, 65, 0}));
  c.q_lens = {};
  c.kv_lens = {};
  lease.expect_equals_fresh_object(c);
  EXPECT_EQ(lease.attention().qo_indptr_buf().data, qo.data);
  EXPECT_EQ(lease.attention().kv_len_buf().data, len.data);
  EXPECT_EQ(read_back(len), (std::vector<int32_t>{0, 0, 0, 0}));
}

// vllm-project/vllm PR 21691: buckets of several sizes in one workspace.
TEST_P(LeaseContract, BucketsShareScratchWhenTheyTakeTurns) {
  AttentionCase c{
      .pool_pages = 200, .splits = {.forced_count = 3}, .kernel = GetParam(), .device = device()};
  c.geometry.num_heads = 2;
  const std::vector<size_t> sizes = {16, 8, 4};
  std::vector<AttentionCase> buckets;
  size_t bytes = 0;
  for (const size_t size : sizes) {
    c.q_lens = ones(size);
    c.kv_lens.assign(size, 70);
    c.bucket =
        Bucket{.num_rows = static_cast<int64_t>(size), .num_tokens = static_cast<int64_t>(size)};
    bytes = std::max(bytes, PagedAttention::scratch_bytes(Problem::config_of(c)));
    buckets.push_back(c);
  }
  cases::Buffer scratch(bytes, 0, device());
  std::vector<PagedAttention> objects;
  for (const AttentionCase& bucket : buckets) {
    AttentionConfig config = Problem::config_of(bucket);
    config.scratch = {scratch.device_data(), scratch.size()};
    objects.emplace_back(config);
  }
  for (const size_t i : {1, 0, 2, 0, 1}) {
    AttentionCase live = buckets[i];
    for (size_t row = 0; row < live.kv_lens.size(); ++row) {
      live.kv_lens[row] = static_cast<int32_t>((row * 37 + i * 11) % 71);
    }
    Problem problem(live);
    objects[i].plan(problem.batch(), Problem::options_of(live));
    problem.run(objects[i]);
    EXPECT_EQ(problem.packed_out(), cases::check_case(live, {.max_rows = 8}).out);
  }
}

}  // namespace
}  // namespace mla::contract
