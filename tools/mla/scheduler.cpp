#include "mla/scheduler.hpp"

#include <algorithm>
#include <cassert>
#include <numeric>

namespace mla::cli {

Scheduler::Scheduler(const std::vector<Request>& requests, const SchedulerLimits& limits,
                     const Speculation& speculation)
    : requests_(&requests), limits_(limits), speculation_(speculation), progress_(requests.size()) {
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
      if (decodes) {
        items.push_back(decode_item(request, budget));
      } else {
        const auto span = static_cast<int32_t>(std::min(missing, budget));
        items.push_back({.request = request, .begin = progress.stored, .span = span});
      }
      budget -= items.back().span;
    }
  }
  return items;
}

StepItem Scheduler::decode_item(int64_t request, int64_t budget) const {
  const Progress& progress = progress_[request];
  const int64_t useful = (*requests_)[request].output_tokens - progress.generated - 1;
  StepItem item{.request = request, .begin = progress.stored};
  item.num_drafts = static_cast<int32_t>(std::min<int64_t>(speculation_.num_drafts, budget - 1));
  item.num_accepted = static_cast<int32_t>(std::min<int64_t>(
      speculation_.draw_accepted((*requests_)[request], item.begin, item.num_drafts), useful));
  item.span = 1 + item.num_drafts;
  return item;
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
  return {.request = request, .begin = stored, .span = static_cast<int32_t>(span)};
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
    const int64_t end = item.kept_end();
    const int64_t known = std::max(progress.ever_stored, item.begin);
    const int64_t first_new = std::clamp(known, item.begin, end);
    outcome.hit_tokens += known - progress.ever_stored;
    outcome.recomputed_tokens += first_new - item.begin;
    outcome.prefill_tokens +=
        std::max<int64_t>(0, std::min(end, request.prompt_tokens) - first_new);
    outcome.drafted_tokens += item.num_drafts;
    outcome.accepted_tokens += item.num_accepted;
    progress.stored = end;
    progress.ever_stored = std::max(known, end);
    if (end < known_tokens(item.request)) continue;
    const bool decoded = progress.generated > 0;  // the first token is the prompt's
    progress.generated += 1 + item.num_accepted;
    if (decoded) outcome.decode_tokens += 1 + item.num_accepted;
    if (progress.generated == request.output_tokens) outcome.finished.push_back(item.request);
  }
  for (const int64_t request : outcome.finished) std::erase(running_, request);
  num_finished_ += static_cast<int64_t>(outcome.finished.size());
  return outcome;
}

}  // namespace mla::cli
