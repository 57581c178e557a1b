#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "mla/scheduler.hpp"

namespace mla::cli {

bool operator==(const StepItem& a, const StepItem& b) {
  return a.request == b.request && a.begin == b.begin && a.span == b.span;
}
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
