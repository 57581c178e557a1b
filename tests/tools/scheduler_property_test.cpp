#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>

#include "mla/scheduler.hpp"

namespace mla::cli {
namespace {

/// A pool that counts tokens: requests hold what they store, nothing is shared.
class TokenPool {
 public:
  explicit TokenPool(int64_t capacity) : free_(capacity) {}

  bool admit(const std::vector<StepItem>& items) {
    int64_t needed = 0;
    for (const StepItem& item : items) needed += item.span;
    if (needed > free_) return false;
    for (const StepItem& item : items) {
      EXPECT_EQ(held_[item.request], item.begin) << "tokens are computed in order, none twice";
      held_[item.request] += item.span;
    }
    free_ -= needed;
    return true;
  }
  void trim(int64_t request, int64_t tokens) {
    free_ += tokens;
    held_[request] -= tokens;
  }
  void remove(int64_t request) {
    free_ += held_[request];
    held_.erase(request);
  }

 private:
  int64_t free_;
  std::map<int64_t, int64_t> held_;
};

struct Totals {
  StepOutcome sum;
  int64_t steps = 0;
};

// Serves all requests as Server does, but with the pool above.
Totals serve(const std::vector<Request>& requests, const SchedulerLimits& limits,
             const Speculation& speculation, int64_t capacity) {
  Scheduler scheduler(requests, limits, speculation);
  scheduler.arrive(std::numeric_limits<double>::infinity());
  TokenPool pool(capacity);
  Totals totals;
  while (!scheduler.done() && ++totals.steps < 1'000'000) {
    std::vector<StepItem> items = scheduler.running_items();
    int64_t budget = limits.token_budget;
    for (const StepItem& item : items) budget -= item.span;
    while (budget > 0 && scheduler.next_to_start()) {
      items.push_back(scheduler.start(0, budget));
      budget -= items.back().span;
    }
    EXPECT_GE(budget, 0);
    EXPECT_LE(static_cast<int64_t>(scheduler.running().size()), limits.max_running);
    while (!pool.admit(items)) {
      EXPECT_GT(scheduler.running().size(), 1U) << "alone it fits";
      if (scheduler.running().size() <= 1) return totals;
      pool.remove(scheduler.last_come());
      scheduler.put_back_last(items);
      if (items.empty()) items = scheduler.running_items();
    }
    int64_t computed = 0;
    for (const StepItem& item : items) {
      computed += item.span;
      pool.trim(item.request, item.num_rejected());
    }
    EXPECT_LE(computed, limits.token_budget);
    const StepOutcome outcome = scheduler.complete(items);
    for (const int64_t request : outcome.finished) pool.remove(request);
    totals.sum.prefill_tokens += outcome.prefill_tokens;
    totals.sum.decode_tokens += outcome.decode_tokens;
    totals.sum.drafted_tokens += outcome.drafted_tokens;
    totals.sum.accepted_tokens += outcome.accepted_tokens;
    totals.sum.recomputed_tokens += outcome.recomputed_tokens;
    totals.sum.finished.insert(totals.sum.finished.end(), outcome.finished.begin(),
                               outcome.finished.end());
  }
  return totals;
}

TEST(SchedulerProperty, EveryRequestIsServedOnceWhateverThePoolAndTheBudget) {
  int64_t recomputed = 0;
  int64_t accepted = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&random](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    std::vector<Request> requests(static_cast<size_t>(draw(1, 20)));
    int64_t prompts = 0;
    int64_t decodes = 0;
    int64_t largest = 0;
    const Speculation speculation{
        .num_drafts = seed % 2 == 0 ? 0 : static_cast<int32_t>(draw(1, 6)), .seed = seed};
    for (Request& request : requests) {
      request.prompt_tokens = draw(1, 60);
      request.output_tokens = draw(1, 30);
      prompts += request.prompt_tokens;
      request.output_key = static_cast<uint64_t>(draw(1, 1'000'000));
      decodes += request.output_tokens - 1;
      largest = std::max(largest, request.peak_tokens(speculation.num_drafts));
    }
    const SchedulerLimits limits{.token_budget = draw(1, 50), .max_running = draw(1, 12)};
    const Totals totals = serve(requests, limits, speculation, largest + draw(0, 100));
    recomputed += totals.sum.recomputed_tokens;
    accepted += totals.sum.accepted_tokens;

    std::vector<int64_t> finished = totals.sum.finished;
    std::ranges::sort(finished);
    ASSERT_EQ(finished.size(), requests.size()) << "seed " << seed;
    for (size_t i = 0; i < finished.size(); ++i) {
      ASSERT_EQ(finished[i], static_cast<int64_t>(i)) << "seed " << seed;
    }
    ASSERT_EQ(totals.sum.prefill_tokens, prompts) << "seed " << seed;
    ASSERT_EQ(totals.sum.decode_tokens, decodes) << "seed " << seed;
    ASSERT_LE(totals.sum.accepted_tokens, totals.sum.drafted_tokens) << "seed " << seed;
    ASSERT_LE(totals.sum.accepted_tokens, decodes) << "seed " << seed;
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
  EXPECT_GT(accepted, 0);
  EXPECT_GT(recomputed, 0) << "pools were too large for this test to mean anything";
}

}  // namespace
}  // namespace mla::cli
