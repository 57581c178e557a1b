#include "mla/executor.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
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

}  // namespace

struct Executor::Crew {
  std::mutex turn;  // one run at a time
  std::atomic<uint32_t> round{0};
  std::atomic<int> unfinished{0};
  // Published by round.
  bool stop = false;
  void (*call)(const void*, int) = nullptr;
  const void* context = nullptr;
  std::vector<std::thread> threads;

  void work(int worker) {
    for (uint32_t seen = 0;;) {
      seen = wait_while(round, seen);
      if (stop) return;
      call(context, worker);
      if (unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished.notify_one();
    }
  }

  void begin_round() {
    round.fetch_add(1, std::memory_order_acq_rel);
    round.notify_all();
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
  crew_ = std::make_unique<Crew>();
  crew_->threads.reserve(static_cast<size_t>(num_threads - 1));
  for (int worker = 1; worker < num_threads; ++worker) {
    crew_->threads.emplace_back([crew = crew_.get(), worker] { crew->work(worker); });
  }
}

Executor::~Executor() {
  crew_->stop = true;
  crew_->begin_round();
  for (std::thread& thread : crew_->threads) thread.join();
}

int Executor::num_threads() const noexcept { return static_cast<int>(crew_->threads.size()) + 1; }

void Executor::run_erased(void (*call)(const void*, int), const void* context) {
  const std::lock_guard lock(crew_->turn);
  const auto others = static_cast<int>(crew_->threads.size());
  if (others > 0) {
    crew_->call = call;
    crew_->context = context;
    crew_->unfinished.store(others, std::memory_order_relaxed);
    crew_->begin_round();
  }
  call(context, 0);
  for (int left = crew_->unfinished.load(std::memory_order_acquire); left != 0;) {
    left = wait_while(crew_->unfinished, left);
  }
}

std::shared_ptr<Executor> Executor::shared() {
  static const auto crew = std::make_shared<Executor>(0);
  return crew;
}

}  // namespace mla
