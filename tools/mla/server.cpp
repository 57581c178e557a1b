#include "mla/server.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <thread>

#include "mla/clock.hpp"
#include "mla/machine.hpp"
#include "mla/usage_error.hpp"

namespace mla::cli {
namespace {

constexpr double kLongestSleepMs = 50;  // so that an interrupt is seen

PoolConfig pool_config(const ReplayOptions& options) {
  PoolConfig config;
  config.num_layers = options.num_layers;
  config.num_pages = pool_pages(options);
  config.page_size = options.page_size;
  config.kv_lora_rank = options.kv_lora_rank;
  config.qk_rope_head_dim = options.qk_rope_head_dim;
  config.dtype = options.dtype;
  config.device = options.device;
  return config;
}

// Of the host. A GPU says itself what it has no room for, when it is asked.
void check_memory(const ReplayOptions& options) {
  if (options.device != Device{}) return;
  const size_t pool = LatentPool::bytes(pool_config(options));
  const auto buffers = static_cast<size_t>(StepExecutor::buffer_bytes(options));
  const int64_t available = describe_machine().available_bytes;
  if (available == 0 || pool + buffers <= static_cast<size_t>(available)) return;
  throw UsageError(fmt::format(
      "the pool of {} layers x {} pages of {} tokens takes {} MiB, the tensors of a step of {} "
      "tokens {} MiB, and {} MiB of memory are available: give fewer --pages, --layers, --heads or "
      "a smaller --token-budget",
      options.num_layers, pool_pages(options), options.page_size, pool >> 20, options.token_budget,
      buffers >> 20, available >> 20));
}

void check_requests_fit(const ReplayOptions& options, const std::vector<Request>& requests) {
  for (size_t i = 0; i < requests.size(); ++i) {
    const int64_t needed = pages_of(requests[i].peak_tokens(options.num_drafts), options.page_size);
    if (needed <= pool_pages(options)) continue;
    const std::string drafts =
        options.num_drafts > 0 ? fmt::format(" and {} drafts", options.num_drafts) : "";
    throw UsageError(fmt::format(
        "request {} of the trace needs {} pages of {} tokens for its {} + {} tokens{}, and the "
        "pool has {}: give --pages {} or a smaller --length-scale",
        i + 1, needed, options.page_size, requests[i].prompt_tokens, requests[i].output_tokens,
        drafts, pool_pages(options), needed));
  }
}

// Checks before any memory is taken.
const ReplayOptions& checked(const ReplayOptions& options, const std::vector<Request>& requests) {
  check_requests_fit(options, requests);
  check_memory(options);
  return options;
}

}  // namespace

int64_t pool_pages(const ReplayOptions& options) {
  return options.num_pages > 0 ? options.num_pages
                               : pages_of(kDefaultPoolTokens, options.page_size);
}

Server::Server(const ReplayOptions& options, const std::vector<Request>& requests)
    : options_(checked(options, requests)),
      requests_(requests),
      total_tokens_(0),
      pool_(pool_config(options)),
      kv_(pool_),
      scheduler_(requests,
                 {.token_budget = options.token_budget, .max_running = options.max_running},
                 {.num_drafts = options.num_drafts, .seed = options.seed}),
      executor_(options, requests, pool_, kv_),
      begin_s_(now_s()) {
  for (const Request& request : requests) total_tokens_ += request.stored_tokens();
}

int64_t Server::served_tokens() const {
  return stats_.prefill_tokens + stats_.hit_tokens + stats_.decode_tokens;
}

void Server::step() {
  const double begin = now_s();
  const double now_ms = (begin - begin_s_) * 1e3;
  scheduler_.arrive(options_.obey_arrivals ? now_ms : std::numeric_limits<double>::infinity());
  const std::vector<StepItem> items = admit_step();
  if (items.empty()) {  // only while an arrival is still to come
    const double wait_ms = scheduler_.next_arrival_ms().value_or(now_ms) - now_ms;
    std::this_thread::sleep_for(
        std::chrono::duration<double, std::milli>(std::min(wait_ms, kLongestSleepMs)));
    return;
  }
  const double schedule_s = now_s() - begin;
  stats_.schedule_s += schedule_s;
  stats_.step_s.push_back(schedule_s + executor_.run(items, stats_));
  account(items);
}

std::vector<StepItem> Server::admit_step() {
  std::vector<StepItem> items = scheduler_.running_items();
  const size_t num_old = scheduler_.running().size();
  start_waiting(items);
  while (!scheduler_.running().empty()) {
    // All that had a share may have been put back for one that had none.
    if (items.empty()) items = scheduler_.running_items();
    if (executor_.admit(items)) break;
    if (scheduler_.running().size() > 1) {
      put_back_last(items, num_old);
      continue;
    }
    // Alone it fits, once no page needs a copy for the sake of the prefix index.
    kv_.drop_prefixes();
    if (executor_.admit(items)) break;
    throw std::logic_error("a request that fits in the pool was not admitted alone");
  }
  stats_.peak_pages =
      std::max(stats_.peak_pages, kv_.num_pages() - kv_.free_pages() - kv_.cached_pages());
  return items;
}

void Server::start_waiting(std::vector<StepItem>& items) {
  int64_t budget = options_.token_budget;
  for (const StepItem& item : items) budget -= item.span;
  for (auto next = scheduler_.next_to_start(); next && budget > 0 && has_room(*next);
       next = scheduler_.next_to_start()) {
    const auto& request = requests_[static_cast<size_t>(*next)];
    const int64_t stored =
        kv_.open({.request = static_cast<RequestId>(*next)}, scheduler_.known_tokens(*next),
                 request.page_keys(options_.page_size));
    items.push_back(scheduler_.start(stored, budget));
    budget -= items.back().span;
  }
}

// Whether all known tokens of `request` would fit beside what the running requests still need for
// theirs, a token more and its drafts: without it requests would start only to be put back.
bool Server::has_room(int64_t request) const {
  const auto& running = scheduler_.running();
  if (running.empty()) return true;
  int64_t needed = pages_of(scheduler_.known_tokens(request), options_.page_size);
  for (const int64_t other : running) {
    const auto held =
        static_cast<int64_t>(kv_.pages({.request = static_cast<RequestId>(other)}).size());
    needed += std::max<int64_t>(
        0, pages_of(scheduler_.known_tokens(other) + 1 + options_.num_drafts, options_.page_size) -
               held);
  }
  return needed <= kv_.free_pages() + kv_.cached_pages();
}

// `num_old` requests were at work before this step: to put one of those back costs its pages.
void Server::put_back_last(std::vector<StepItem>& items, size_t num_old) {
  if (scheduler_.running().size() <= num_old) ++stats_.preemptions;
  kv_.remove(static_cast<RequestId>(scheduler_.last_come()));
  scheduler_.put_back_last(items);
}

void Server::account(const std::vector<StepItem>& items) {
  const StepOutcome outcome = scheduler_.complete(items);
  stats_.prefill_tokens += outcome.prefill_tokens;
  stats_.hit_tokens += outcome.hit_tokens;
  stats_.decode_tokens += outcome.decode_tokens;
  stats_.recomputed_tokens += outcome.recomputed_tokens;
  stats_.drafted_tokens += outcome.drafted_tokens;
  stats_.accepted_tokens += outcome.accepted_tokens;
  for (const int64_t request : outcome.finished) {
    kv_.remove(static_cast<RequestId>(request));
    ++stats_.requests_finished;
  }
  stats_.requests_failed = static_cast<int64_t>(checker().failed_requests().size());
}

void Server::finish() {
  for (const int64_t request : scheduler_.running()) kv_.remove(static_cast<RequestId>(request));
  kv_.drop_prefixes();
  stats_.pages_leaked = kv_.num_pages() - kv_.check().free;
  stats_.wall_s = now_s() - begin_s_;
}

}  // namespace mla::cli
