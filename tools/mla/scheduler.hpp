#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "mla/step_item.hpp"
#include "mla/workload.hpp"

namespace mla::cli {

struct SchedulerLimits {
  int64_t token_budget = 2048;  ///< new tokens of a step, all requests together
  int64_t max_running = 256;    ///< requests that hold pages at a time
};

/// What a step brought forward.
struct StepOutcome {
  int64_t prefill_tokens = 0;     ///< prompt tokens computed for the first time
  int64_t hit_tokens = 0;         ///< prompt tokens found in the cache instead, the first time
  int64_t decode_tokens = 0;      ///< output tokens after the first of their request
  int64_t recomputed_tokens = 0;  ///< tokens that a removed request had computed already
  int64_t drafted_tokens = 0;     ///< guesses that were verified
  int64_t accepted_tokens = 0;    ///< those that were right: decode tokens too
  std::vector<int64_t> finished;
};

/// Decides who computes what: continuous batching with chunked prefill, first come first served.
/// It knows nothing of pages: the caller tells it what the cache holds when a request starts, and
/// puts requests back when pages run out. A request that is put back starts again from nothing and
/// computes what it had generated as if it were prompt.
///
/// Progress: the request that came first is put back last, so as long as it fits alone in the pool
/// it ends.
class Scheduler {
 public:
  /// Both are lent. Requests arrive only through arrive().
  Scheduler(const std::vector<Request>& requests, const SchedulerLimits& limits,
            const Speculation& speculation = {});

  /// Lets the requests with arrival_ms <= now_ms join the queue. Infinity: all of them.
  void arrive(double now_ms);
  /// When the next request joins the queue; none where all have.
  std::optional<double> next_arrival_ms() const;

  /// Shares of the running requests under the budget: for each that decodes a token and its drafts
  /// (fewer where the budget ends), then what is left to those that still have known tokens to
  /// compute, oldest first. No draft past the end of its request is accepted.
  std::vector<StepItem> running_items() const;

  /// The request that starts next; none where nobody waits or max_running are at work.
  std::optional<int64_t> next_to_start() const;
  /// Tokens that the request knows: its prompt and what it has generated so far.
  int64_t known_tokens(int64_t request) const;
  /// Moves next_to_start() to the running requests. `stored` of its tokens are in the cache. Its
  /// share is what is left of the budget, at least 1.
  StepItem start(int64_t stored, int64_t budget_left);

  /// The running request that came last: the one to put back when pages are short.
  int64_t last_come() const { return running_.back(); }
  /// Puts last_come() back to the head of the queue and takes it out of `items`.
  void put_back_last(std::vector<StepItem>& items);

  /// The step was computed, and what it rejected was trimmed: every request whose known tokens are
  /// all stored generates one more than it had drafts accepted.
  StepOutcome complete(const std::vector<StepItem>& items);

  const std::vector<int64_t>& running() const { return running_; }
  bool done() const { return num_finished_ == static_cast<int64_t>(requests_->size()); }

 private:
  StepItem decode_item(int64_t request, int64_t budget) const;

  struct Progress {
    int64_t stored = 0;       // tokens in the cache
    int64_t generated = 0;    // output tokens so far
    int64_t ever_stored = 0;  // the most that `stored` has been after a step
  };

  const std::vector<Request>* requests_;
  SchedulerLimits limits_;
  Speculation speculation_;
  std::vector<Progress> progress_;
  std::vector<int64_t> arrivals_;  // all requests in order of arrival
  size_t num_arrived_ = 0;
  // Both in order of arrival, and all that run came before all that wait.
  std::deque<int64_t> waiting_;
  std::vector<int64_t> running_;
  int64_t num_finished_ = 0;
};

}  // namespace mla::cli
