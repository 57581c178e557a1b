#include "mla/scheduler.hpp"

#include <algorithm>
#include <cassert>
#include <numeric>

namespace mla::cli {

Scheduler::Scheduler(const std::vector<Request>& requests, const SchedulerLimits& limits)
    : requests_(&requests), limits_(limits), progress_(requests.size()) {
  arrivals_.resize(requests.size());
  std::iota(arrivals_.begin(), arrivals_.end(), 0);
  std::ranges::stable_sort(arrivals_, {}, [&](int64_t r) { return requests[r].arrival_ms; });
}

void Scheduler::arrive(double now_ms) {
  while (num_arrived_ < arrivals_.size() &&
         (*requests_)[arrivals_[num_arrived_]].arrival_ms <= now_ms) {
    waiting_.push_back(arrivals_[num_arrived_++]);
  }
}

std::optional<double> Scheduler::next_arrival_ms() const {
  if (num_arrived_ == arrivals_.size()) return std::nullopt;
  return (*requests_)[arrivals_[num_arrived_]].arrival_ms;
}

int64_t Scheduler::known_tokens(int64_t request) const {
  return (*requests_)[request].prompt_tokens + progress_[request].generated;
}

std::vector<StepItem> Scheduler::running_items() const {
  std::vector<StepItem> items;
  int64_t budget = limits_.token_budget;
  // Decoding first: it holds pages, and a user waits for each of its tokens.
  for (const bool decoding : {true, false}) {
    for (const int64_t request : running_) {
      const Progress& progress = progress_[request];
      const int64_t missing = known_tokens(request) - progress.stored;
      const bool decodes = progress.generated > 0 && missing == 1;
      if (decodes != decoding || budget == 0) continue;
      const int64_t span = std::min(missing, budget);
      items.push_back({request, progress.stored, static_cast<int32_t>(span)});
      budget -= span;
    }
  }
  return items;
}

std::optional<int64_t> Scheduler::next_to_start() const {
  if (waiting_.empty() || static_cast<int64_t>(running_.size()) >= limits_.max_running) {
    return std::nullopt;
  }
  return waiting_.front();
}

StepItem Scheduler::start(int64_t stored, int64_t budget_left) {
  const int64_t request = waiting_.front();
  waiting_.pop_front();
  running_.push_back(request);
  progress_[request].stored = stored;
  const int64_t span = std::min(known_tokens(request) - stored, budget_left);
  assert(span >= 1);
  return {request, stored, static_cast<int32_t>(span)};
}

void Scheduler::put_back_last(std::vector<StepItem>& items) {
  const int64_t request = running_.back();
  running_.pop_back();
  progress_[request].stored = 0;
  waiting_.push_front(request);
  std::erase_if(items, [&](const StepItem& item) { return item.request == request; });
}

StepOutcome Scheduler::complete(const std::vector<StepItem>& items) {
  StepOutcome outcome;
  for (const StepItem& item : items) {
    const Request& request = (*requests_)[item.request];
    Progress& progress = progress_[item.request];
    const int64_t end = item.begin + item.span;
    const int64_t known = std::max(progress.ever_stored, item.begin);
    const int64_t first_new = std::clamp(known, item.begin, end);
    outcome.hit_tokens += known - progress.ever_stored;
    outcome.recomputed_tokens += first_new - item.begin;
    outcome.prefill_tokens +=
        std::max<int64_t>(0, std::min(end, request.prompt_tokens) - first_new);
    progress.stored = end;
    progress.ever_stored = std::max(known, end);
    if (end < known_tokens(item.request)) continue;
    if (progress.generated++ > 0) ++outcome.decode_tokens;
    if (progress.generated == request.output_tokens) outcome.finished.push_back(item.request);
  }
  for (const int64_t request : outcome.finished) std::erase(running_, request);
  num_finished_ += static_cast<int64_t>(outcome.finished.size());
  return outcome;
}

}  // namespace mla::cli
