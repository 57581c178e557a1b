#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "mla/scheduler.hpp"

namespace mla::cli {

void PrintTo(const StepItem& item, std::ostream* out) {
  *out << "{request " << item.request << ", begin " << item.begin << ", span " << item.span << "}";
}

namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr double kEver = std::numeric_limits<double>::infinity();

Request request_of(int64_t prompt, int64_t output, double arrival_ms = 0) {
  Request request;
  request.prompt_tokens = prompt;
  request.output_tokens = output;
  request.arrival_ms = arrival_ms;
  return request;
}

TEST(SchedulerUnit, PromptIsComputedInChunksOfTheBudget) {
  const std::vector<Request> requests = {request_of(10, 2)};
  Scheduler scheduler(requests, {.token_budget = 4});
  scheduler.arrive(kEver);
  EXPECT_THAT(scheduler.running_items(), IsEmpty());
  StepOutcome outcome = scheduler.complete({scheduler.start(0, 4)});
  EXPECT_EQ(outcome.prefill_tokens, 4);
  EXPECT_THAT(scheduler.running_items(), ElementsAre(StepItem{0, 4, 4}));
  scheduler.complete(scheduler.running_items());
  EXPECT_THAT(scheduler.running_items(), ElementsAre(StepItem{0, 8, 2}));
  outcome = scheduler.complete(scheduler.running_items());
  EXPECT_EQ(outcome.decode_tokens, 0) << "the first output token comes of the prompt's last row";
  EXPECT_THAT(scheduler.running_items(), ElementsAre(StepItem{0, 10, 1}));
  outcome = scheduler.complete(scheduler.running_items());
  EXPECT_EQ(outcome.decode_tokens, 1);
  EXPECT_THAT(outcome.finished, ElementsAre(0));
  EXPECT_TRUE(scheduler.done());
}

TEST(SchedulerUnit, RequestOfOneOutputTokenEndsWithItsPrompt) {
  const std::vector<Request> requests = {request_of(3, 1)};
  Scheduler scheduler(requests, {});
  scheduler.arrive(kEver);
  const StepOutcome outcome = scheduler.complete({scheduler.start(0, 100)});
  EXPECT_EQ(outcome.prefill_tokens, 3);
  EXPECT_EQ(outcome.decode_tokens, 0);
  EXPECT_TRUE(scheduler.done());
}

TEST(SchedulerUnit, DecodingComesBeforePromptsAndPromptsInOrderOfArrival) {
  const std::vector<Request> requests = {request_of(9, 5), request_of(2, 5), request_of(9, 5)};
  Scheduler scheduler(requests, {.token_budget = 8});
  scheduler.arrive(kEver);
  const StepItem first = scheduler.start(0, 4);
  const StepItem second = scheduler.start(0, 2);
  const StepItem third = scheduler.start(0, 2);
  scheduler.complete({first, second, third});
  EXPECT_THAT(scheduler.running_items(),
              ElementsAre(StepItem{1, 2, 1}, StepItem{0, 4, 5}, StepItem{2, 2, 2}));
}

TEST(SchedulerUnit, TokensFoundInTheCacheAreHitsAndNotComputed) {
  const std::vector<Request> requests = {request_of(10, 1)};
  Scheduler scheduler(requests, {});
  scheduler.arrive(kEver);
  const StepItem item = scheduler.start(6, 100);
  EXPECT_EQ(item, (StepItem{0, 6, 4}));
  const StepOutcome outcome = scheduler.complete({item});
  EXPECT_EQ(outcome.hit_tokens, 6);
  EXPECT_EQ(outcome.prefill_tokens, 4);
}

TEST(SchedulerUnit, RequestThatIsPutBackComputesAgainWhatItHad) {
  const std::vector<Request> requests = {request_of(4, 3), request_of(4, 3)};
  Scheduler scheduler(requests, {});
  scheduler.arrive(kEver);
  const StepItem first = scheduler.start(0, 100);
  const StepItem second = scheduler.start(0, 100);
  scheduler.complete({first, second});
  std::vector<StepItem> items = scheduler.running_items();
  EXPECT_EQ(scheduler.last_come(), 1);
  scheduler.put_back_last(items);
  EXPECT_THAT(items, ElementsAre(StepItem{0, 4, 1}));
  EXPECT_EQ(scheduler.next_to_start(), 1);
  EXPECT_EQ(scheduler.known_tokens(1), 5) << "its first output token is known";

  items.push_back(scheduler.start(0, 100));
  EXPECT_EQ(items.back(), (StepItem{1, 0, 5}));
  const StepOutcome outcome = scheduler.complete(items);
  EXPECT_EQ(outcome.recomputed_tokens, 4);
  EXPECT_EQ(outcome.prefill_tokens, 0);
  EXPECT_EQ(outcome.decode_tokens, 2) << "one of each request";
}

TEST(SchedulerUnit, HitsOfARequestThatIsRefusedCountOnce) {
  const std::vector<Request> requests = {request_of(4, 5), request_of(10, 1)};
  Scheduler scheduler(requests, {});
  scheduler.arrive(kEver);
  std::vector<StepItem> items = {scheduler.start(0, 100), scheduler.start(6, 100)};
  scheduler.put_back_last(items);  // never admitted
  EXPECT_EQ(scheduler.complete(items).hit_tokens, 0);
  const StepOutcome outcome = scheduler.complete({scheduler.start(8, 100)});
  EXPECT_EQ(outcome.hit_tokens, 8);
  EXPECT_EQ(outcome.prefill_tokens, 2);
}

// A request whose prompt of 10 tokens is computed, so that it decodes from here on.
Scheduler decoding(const std::vector<Request>& requests, int64_t budget, int32_t num_drafts) {
  Scheduler scheduler(requests, {.token_budget = budget}, {.num_drafts = num_drafts, .seed = 1});
  scheduler.arrive(kEver);
  scheduler.complete({scheduler.start(0, 100)});
  return scheduler;
}

TEST(SchedulerUnit, DecodeStepVerifiesATokenAndItsDrafts) {
  const std::vector<Request> requests = {request_of(10, 50)};
  Scheduler scheduler = decoding(requests, 100, 3);
  StepItem item = scheduler.running_items().at(0);
  EXPECT_EQ(item.begin, 10);
  EXPECT_EQ(item.span, 4);
  EXPECT_EQ(item.num_drafts, 3);
  item.num_accepted = 2;
  const StepOutcome outcome = scheduler.complete({item});
  EXPECT_EQ(outcome.drafted_tokens, 3);
  EXPECT_EQ(outcome.accepted_tokens, 2);
  EXPECT_EQ(outcome.decode_tokens, 3) << "two drafts and the token after them";
  EXPECT_EQ(outcome.recomputed_tokens, 0);
  EXPECT_EQ(scheduler.known_tokens(0), 14);
  EXPECT_EQ(scheduler.running_items().at(0).begin, 13) << "the rejected draft is not stored";
}

TEST(SchedulerUnit, RejectedDraftsAreComputedAgainWithoutBeingCountedAgain) {
  const std::vector<Request> requests = {request_of(10, 50)};
  Scheduler scheduler = decoding(requests, 100, 3);
  for (int64_t step = 0; step < 3; ++step) {
    StepItem item = scheduler.running_items().at(0);
    EXPECT_EQ(item.begin, 10 + step);
    item.num_accepted = 0;
    const StepOutcome outcome = scheduler.complete({item});
    EXPECT_EQ(outcome.decode_tokens, 1);
    EXPECT_EQ(outcome.recomputed_tokens, 0);
  }
}

TEST(SchedulerUnit, DraftsPastTheEndOfTheRequestAreRejected) {
  for (int64_t output = 2; output < 40; ++output) {
    const std::vector<Request> requests = {request_of(10, output)};
    Scheduler scheduler = decoding(requests, 100, 5);
    int64_t decoded = 0;
    int64_t stored = 0;
    while (!scheduler.done()) {
      const std::vector<StepItem> items = scheduler.running_items();
      ASSERT_THAT(items, testing::SizeIs(1));
      EXPECT_EQ(items[0].span, 6) << "as many rows to the end";
      stored = items[0].kept_end();
      decoded += scheduler.complete(items).decode_tokens;
      ASSERT_LT(decoded, output);
    }
    EXPECT_EQ(decoded, output - 1);
    EXPECT_EQ(stored, requests[0].stored_tokens());
  }
}

TEST(SchedulerUnit, BudgetCutsDraftsBeforeTokens) {
  const std::vector<Request> requests = {request_of(10, 50)};
  for (const int64_t budget : {1, 2, 3}) {
    Scheduler scheduler = decoding(requests, budget, 3);
    const StepItem item = scheduler.running_items().at(0);
    EXPECT_EQ(item.span, budget);
    EXPECT_EQ(item.num_drafts, budget - 1);
    EXPECT_LE(item.num_accepted, item.num_drafts);
  }
}

TEST(SchedulerUnit, PromptsAreNotSpeculatedOn) {
  const std::vector<Request> requests = {request_of(10, 5)};
  Scheduler scheduler(requests, {.token_budget = 4}, {.num_drafts = 3, .seed = 1});
  scheduler.arrive(kEver);
  scheduler.complete({scheduler.start(0, 4)});
  EXPECT_THAT(scheduler.running_items(), ElementsAre(StepItem{0, 4, 4}));
}

TEST(SchedulerUnit, NoMoreThanMaxRunningStart) {
  const std::vector<Request> requests(3, request_of(1, 9));
  Scheduler scheduler(requests, {.token_budget = 100, .max_running = 2});
  scheduler.arrive(kEver);
  scheduler.start(0, 100);
  scheduler.start(0, 100);
  EXPECT_FALSE(scheduler.next_to_start());
}

TEST(SchedulerUnit, RequestsArriveInOrderOfTime) {
  const std::vector<Request> requests = {request_of(1, 1, 20), request_of(1, 1, 10)};
  Scheduler scheduler(requests, {});
  EXPECT_EQ(scheduler.next_arrival_ms(), 10);
  scheduler.arrive(9);
  EXPECT_FALSE(scheduler.next_to_start());
  scheduler.arrive(10);
  EXPECT_EQ(scheduler.next_to_start(), 1);
  EXPECT_EQ(scheduler.next_arrival_ms(), 20);
  scheduler.arrive(20);
  EXPECT_FALSE(scheduler.next_arrival_ms());
  EXPECT_EQ(scheduler.next_to_start(), 1) << "first come, first served";
}

}  // namespace
}  // namespace mla::cli
