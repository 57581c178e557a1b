#include "mla/executor.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "mla/error.hpp"

namespace mla {
namespace {

constexpr int kMaxThreads = 1024;
// About 20 us: as long as a decode step leaves its workers idle between two layers. Longer waits
// sleep in the kernel, so that an idle crew costs nothing.
constexpr int kSpins = 500;

int usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `value` is no longer `old`, and returns what it is then.
template <class T>
T wait_while(const std::atomic<T>& value, T old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (const T now = value.load(std::memory_order_acquire); now != old) return now;
    relax();
  }
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

// Forks between the process that loaded the library and this one. A child has none of the threads
// of its parent, and a mutex that one of them held stays locked.
std::atomic<uint32_t> num_forks{0};

void count_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { num_forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
}

// The threads that one process has for an executor.
class Team {
 public:
  explicit Team(int num_threads) {
    threads_.reserve(static_cast<size_t>(num_threads - 1));
    try {
      for (int worker = 1; worker < num_threads; ++worker) {
        threads_.emplace_back([this, worker] { work(worker); });
      }
    } catch (...) {  // no more threads for this process
      end();
      throw;
    }
  }
  ~Team() { end(); }

  bool is_of_this_process() const {
    return num_forks_ == num_forks.load(std::memory_order_relaxed);
  }

  void run(void (*call)(const void*, int), const void* context) {
    const std::lock_guard lock(turn_);
    const auto others = static_cast<int>(threads_.size());
    if (others > 0) {
      call_ = call;
      context_ = context;
      unfinished_.store(others, std::memory_order_relaxed);
      begin_round();
    }
    call(context, 0);
    for (int left = unfinished_.load(std::memory_order_acquire); left != 0;) {
      left = wait_while(unfinished_, left);
    }
  }

 private:
  void work(int worker) {
    for (uint32_t seen = 0;;) {
      seen = wait_while(round_, seen);
      if (stop_) return;
      call_(context_, worker);
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
    }
  }

  void begin_round() {
    round_.fetch_add(1, std::memory_order_acq_rel);
    round_.notify_all();
  }

  void end() {
    stop_ = true;
    begin_round();
    for (std::thread& thread : threads_) thread.join();
  }

  const uint32_t num_forks_ = num_forks.load(std::memory_order_relaxed);
  std::mutex turn_;  // one run at a time
  std::atomic<uint32_t> round_{0};
  std::atomic<int> unfinished_{0};
  // Published by round_.
  bool stop_ = false;
  void (*call_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace

struct Executor::Crew {
  int num_threads;
  std::atomic<Team*> team;

  explicit Crew(int threads) : num_threads(threads), team(new Team(threads)) {}
  ~Crew() {
    // A parent's team cannot be joined here, and is left as it is.
    if (Team* last = team.load(); last->is_of_this_process()) delete last;
  }

  Team& of_this_process() {
    Team* known = team.load(std::memory_order_acquire);
    if (known->is_of_this_process()) return *known;
    auto fresh = std::make_unique<Team>(num_threads);
    // Of several callers that find the parent's team the first one's serves them all.
    if (!team.compare_exchange_strong(known, fresh.get())) return *known;
    return *fresh.release();
  }
};

Executor::Executor(int num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw_invalid({.what = "num_threads",
                   .where = "Executor",
                   .expected = "0 to " + std::to_string(kMaxThreads),
                   .got = std::to_string(num_threads)});
  }
  if (num_threads == 0) num_threads = std::min(usable_processors(), kMaxThreads);
  count_forks();
  crew_ = std::make_unique<Crew>(num_threads);
}

Executor::~Executor() = default;

int Executor::num_threads() const noexcept { return crew_->num_threads; }

void Executor::run_erased(void (*call)(const void*, int), const void* context) {
  crew_->of_this_process().run(call, context);
}

std::shared_ptr<Executor> Executor::shared() {
  static const auto crew = std::make_shared<Executor>(0);
  return crew;
}

}  // namespace mla
