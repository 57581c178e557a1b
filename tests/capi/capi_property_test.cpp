#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "mla/mla_engine.h"

// An engine that calls in any order, with arguments of which many are nonsense: every call does its
// work or is refused with a text in four parts, no page is lost, and what the library hands out can
// be read.
namespace mla::capi {
namespace {

constexpr int32_t kRank = 4, kHeads = 1, kPage = 4, kMaxTokens = 64;

// A call that may be refused, counted under its name.
#define MAY(call) may(call, #call)

// How often each call did its work and was refused.
struct Outcomes {
  int done = 0, refused = 0;
};
using Counts = std::map<std::string, Outcomes>;

class WildEngine {
 public:
  WildEngine(uint32_t seed, Counts& counts) : random_(seed), counts_(counts) {
    mla_pool_config pool{};
    pool.struct_size = sizeof pool;
    pool.page_size = kPage;
    pool.num_pages = 10;
    pool.kv_lora_rank = kRank;
    pool.dtype = MLA_FLOAT32;
    must(mla_pool_create(&pool, &pool_));
    mla_kv_options options{};
    options.struct_size = sizeof options;
    options.check_every_call = 1;
    must(mla_kv_resource_create(pool_, &options, &kv_));
    for (mla_step*& step : steps_) must(mla_step_create(&step));
    make_runner();
  }
  WildEngine(const WildEngine&) = delete;
  WildEngine& operator=(const WildEngine&) = delete;
  ~WildEngine() {
    mla_pool_destroy(pool_);
    mla_kv_resource_destroy(kv_);
    mla_attention_resource_destroy(attention_);
    for (mla_step* step : steps_) mla_step_destroy(step);
    mla_step_runner_destroy(runner_);
  }

  void call() {
    mla_admission answer{};
    answer.struct_size = sizeof answer;
    mla_step* step = steps_[below(2)];
    switch (below(20)) {
      case 0:
      case 1:
        MAY(mla_kv_resource_open(kv_, stream(), below(12) - 1, nullptr, 0, nullptr));
        break;
      case 2:
        MAY(mla_kv_resource_fork(kv_, stream(), stream()));
        break;
      case 3:
        MAY(mla_kv_resource_trim(kv_, stream(), below(8) - 1));
        break;
      case 4:
        MAY(mla_kv_resource_remove(kv_, static_cast<uint64_t>(below(5))));
        break;
      case 5:
      case 6:
        return set_kv(step);
      case 7:
        return set_attention(step);
      case 8:
      case 9:
      case 10:
        MAY(mla_step_runner_admit(runner_, step, &answer));
        return plan(step);
      case 11:
        return plan(step);
      case 12:
      case 13:
        MAY(mla_step_runner_commit(runner_));
        break;
      case 14:
        MAY(mla_step_runner_abandon(runner_));
        break;
      case 15:
        MAY(mla_step_runner_pre_admit(runner_, step, &answer));
        return pre_plan(step);
      case 16:
        MAY(mla_step_runner_clear_preplan(runner_));
        break;
      case 17:
      case 18:
        return run();
      default:
        if (below(20) == 0) make_runner();
        return read_plans();
    }
  }

  void check() const { must(mla_kv_resource_check(kv_, nullptr)); }

 private:
  int32_t below(int32_t end) {
    return static_cast<int32_t>(random_() % static_cast<uint32_t>(end));
  }
  const char* label() {
    constexpr std::array<const char*, 4> kLabels = {nullptr, nullptr, "main", "draft"};
    return kLabels[static_cast<size_t>(below(4))];
  }
  mla_kv_stream stream() { return {static_cast<uint64_t>(below(5)), label()}; }

  static void must(mla_status status) { ASSERT_EQ(status, MLA_OK) << mla_last_error(); }
  bool may(mla_status status, const std::string& call) {
    Outcomes& outcomes = counts_[call.substr(0, call.find('('))];
    ++(status == MLA_OK ? outcomes.done : outcomes.refused);
    if (status != MLA_OK) expect_refusal(status);
    return status == MLA_OK;
  }
  static void expect_refusal(mla_status status) {
    ASSERT_TRUE(status == MLA_INVALID_ARGUMENT || status == MLA_INVALID_STATE) << mla_last_error();
    ASSERT_NE(std::string(mla_last_error()).find(": expected "), std::string::npos)
        << mla_last_error();
  }

  // In place of the one before, whatever that is in the middle of.
  void make_runner() {
    mla_step_runner_destroy(runner_);
    mla_attention_resource_destroy(attention_);
    mla_attention_options options{};
    options.struct_size = sizeof options;
    options.num_heads = kHeads;
    options.sm_scale = 1;
    options.max_rows = 6;
    options.max_tokens = kMaxTokens;
    options.max_listed_pages = 64;
    must(mla_attention_resource_create(kv_, &options, &attention_));
    mla_step_runner_config config{};
    config.struct_size = sizeof config;
    config.kv_resources = &kv_;
    config.attention_resources = &attention_;
    config.num_kv_resources = config.num_attention_resources = 1;
    must(mla_step_runner_create(&config, &runner_));
  }

  void set_kv(mla_step* step) {
    std::array<mla_segment, 4> segments{};
    for (mla_segment& segment : segments) {
      segment = {static_cast<uint64_t>(below(5)), label(), below(9) - 1};
    }
    const mla_fork before = {stream(), stream()};
    const mla_fork after = {stream(), stream()};
    const std::array<const char*, 2> labels = {label(), "draft"};
    const mla_combined_label combined = {below(4) == 0 ? nullptr : "both", labels.data(), 2};
    mla_kv_step part{};
    part.struct_size = sizeof part;
    part.segments = segments.data();
    part.num_segments = below(20) == 0 ? -1 : below(4);
    part.forks_before = &before;
    part.num_forks_before = below(8) == 0 ? 1 : 0;
    part.forks_after = &after;
    part.num_forks_after = below(8) == 0 ? 1 : 0;
    part.combined = &combined;
    part.num_combined = below(8) == 0 ? 1 : 0;
    part.labels = labels.data();
    part.num_labels = below(4) == 0 ? 2 : 0;
    MAY(mla_step_set_kv(step, nullptr, &part));
  }

  void set_attention(mla_step* step) {
    const mla_query_segment query = {label(), below(4) - 1, below(2), below(3) - 1};
    std::array<mla_attention_pass, 3> passes{};
    for (mla_attention_pass& pass : passes) {
      pass = {below(2), below(8) == 0 ? 1 : 0, &query, below(4) == 0 ? 1 : 0};
    }
    mla_attention_step part{};
    part.struct_size = sizeof part;
    part.passes = passes.data();
    part.num_passes = below(4);
    MAY(mla_step_set_attention(step, nullptr, &part));
  }

  mla_lease lease() {
    mla_lease lease{};
    lease.struct_size = sizeof lease;
    lease.slot = below(8) == 0 ? -1 : below(2);
    if (below(3) != 0) return lease;
    lease.walk = "decode";
    lease.bucket_rows = below(3) * 3;
    lease.bucket_tokens = below(3) * 32;
    return lease;
  }
  void plan(mla_step* step) {
    const mla_lease into = lease();
    MAY(mla_step_runner_plan(runner_, step, &into, nullptr));
  }
  void pre_plan(mla_step* step) {
    const mla_lease into = lease();
    MAY(mla_step_runner_pre_plan(runner_, step, &into, nullptr));
  }

  mla_tensor tensor(int32_t rank, int64_t tokens, int64_t b, int64_t c) {
    const std::array<int64_t, 3> shape = {tokens, b, c};
    return mla_contiguous_tensor(values_.data(), MLA_FLOAT32, rank, shape.data());
  }

  void run() {
    const char* of = label();
    const int32_t pass = below(3) - (below(10) == 0 ? 1 : 0);
    mla_label_plan plan{};
    plan.struct_size = sizeof plan;
    int64_t tokens = below(kMaxTokens);
    if (mla_kv_resource_label_plan(kv_, of, &plan) == MLA_OK) tokens = plan.num_new_rows;
    const mla_tensor rows = tensor(2, tokens, kRank, 0);
    MAY(mla_kv_resource_write(kv_, below(10) == 0 ? 1 : 0, of, &rows, nullptr, nullptr));
    mla_attend_args args{};
    args.struct_size = sizeof args;
    args.label = of;
    args.pass = pass;
    mla_tensor offsets{};
    if (mla_attention_resource_qo_indptr_buf(attention_, of, pass, &offsets) == MLA_OK) {
      tokens = static_cast<const int32_t*>(offsets.data)[offsets.shape[0] - 1];
    }
    args.q_nope = tensor(3, tokens, kHeads, kRank);
    args.out = args.q_nope;
    args.out.data = out_.data();
    MAY(mla_attention_resource_run(attention_, &args, nullptr));
    const mla_tensor hidden = tensor(2, tokens, kRank, 0);
    mla_tensor last = hidden;
    last.data = out_.data();
    last.shape[0] = offsets.shape[0] - 1;
    MAY(mla_attention_resource_select_last_hidden(attention_, of, pass, &hidden, &last, nullptr));
  }

  // Every number that a plan hands out is in range; so it is read.
  void read_plans() {
    mla_label_plan plan{};
    plan.struct_size = sizeof plan;
    if (MAY(mla_step_runner_early_label_plan(runner_, nullptr, label(), &plan))) read(plan);
    if (MAY(mla_kv_resource_label_plan(kv_, label(), &plan))) read(plan);
  }
  static void read(const mla_label_plan& plan) {
    ASSERT_EQ(plan.qo_indptr[plan.num_rows], plan.num_new_rows);
    ASSERT_EQ(plan.kv_indptr[plan.num_rows], plan.num_kv_indices);
    for (int64_t i = 0; i < plan.num_kv_indices; ++i) ASSERT_LT(plan.kv_indices[i], 10);
    for (int64_t i = 0; i < plan.num_slots; ++i) {
      ASSERT_LT(plan.slots[i], 10 * kPage);
      ASSERT_GE(plan.slots[i], i < plan.num_new_rows ? 0 : -1);
    }
    for (int64_t row = 0; row < plan.num_rows; ++row) {
      mla_kv_view view{};
      view.struct_size = sizeof view;
      must(mla_label_plan_view(&plan, row, &view));
      ASSERT_EQ(view.length, plan.kv_len[row]);
      ASSERT_FALSE(std::string(view.label).empty());
      ASSERT_LE(view.num_pages * kPage - view.length, kPage - 1);
    }
  }

  std::mt19937 random_;
  Counts& counts_;
  mla_pool* pool_ = nullptr;
  mla_kv_resource* kv_ = nullptr;
  mla_attention_resource* attention_ = nullptr;
  mla_step_runner* runner_ = nullptr;
  std::array<mla_step*, 2> steps_{};
  std::vector<float> values_ = std::vector<float>(kMaxTokens * kRank);
  std::vector<float> out_ = std::vector<float>(kMaxTokens * kRank);
};

TEST(CapiProperty, CallsInAnyOrderDoTheirWorkOrAreRefused) {
  Counts counts;
  for (uint32_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    WildEngine engine(seed, counts);
    for (int i = 0; i < 1000; ++i) {
      SCOPED_TRACE("call " + std::to_string(i));
      engine.call();
      engine.check();
      if (testing::Test::HasFailure()) return;
    }
  }
  for (const auto& [call, outcomes] : counts) {
    EXPECT_GT(outcomes.done, 0) << call;
    if (call == "mla_step_runner_clear_preplan") continue;  // never refused
    EXPECT_GT(outcomes.refused, 0) << call;
  }
}

}  // namespace
}  // namespace mla::capi
