#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "mla/error.hpp"
#include "mla/executor.hpp"

namespace mla {
namespace {

TEST(ExecutorUnit, EveryWorkerRunsOncePerCall) {
  for (const int num_threads : {1, 2, 3, 8}) {
    Executor executor(num_threads);
    ASSERT_EQ(executor.num_threads(), num_threads);
    std::vector<int> calls(static_cast<size_t>(num_threads), 0);  // unsynchronised on purpose
    for (int round = 1; round <= 2000; ++round) {
      executor.run([&](int worker) { ++calls[static_cast<size_t>(worker)]; });
      for (const int count : calls) ASSERT_EQ(count, round);
    }
  }
}

TEST(ExecutorUnit, CallersFromSeveralThreadsTakeTurns) {
  Executor executor(3);
  std::atomic<int> inside{0};
  std::atomic<int> total{0};
  const auto caller = [&] {
    for (int round = 0; round < 500; ++round) {
      executor.run([&](int) {
        EXPECT_LE(inside.fetch_add(1) + 1, 3) << "two runs at once";
        total.fetch_add(1);
        inside.fetch_sub(1);
      });
    }
  };
  std::thread first(caller);
  std::thread second(caller);
  first.join();
  second.join();
  EXPECT_EQ(total.load(), 2 * 500 * 3);
}

TEST(ExecutorUnit, SleepsThroughAPauseAndWakes) {
  Executor executor(2);
  std::atomic<int> total{0};
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    executor.run([&](int) { total.fetch_add(1); });
  }
  EXPECT_EQ(total.load(), 10);
}

#ifdef __SANITIZE_THREAD__  // it takes no process that forks and then starts threads
constexpr bool kMayFork = false;
#else
constexpr bool kMayFork = true;
#endif

// What fn returns in a forked child; fails if that takes longer than 20 seconds.
template <class Fn>
int in_forked_child(const Fn& fn) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(fn());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  return WEXITSTATUS(status);
}

int workers_of_a_run(Executor& executor) {
  std::atomic<int> total{0};
  executor.run([&](int) { total.fetch_add(1); });
  return total.load();
}

TEST(ExecutorUnit, AForkedProcessHasThreadsOfItsOwn) {
  if (!kMayFork) GTEST_SKIP() << "not under ThreadSanitizer";
  Executor executor(3);
  ASSERT_EQ(workers_of_a_run(executor), 3);
  const auto serve = [&] { return workers_of_a_run(executor) + workers_of_a_run(executor); };
  EXPECT_EQ(in_forked_child(serve), 6);
  EXPECT_EQ(in_forked_child([&] { return in_forked_child(serve); }), 6) << "a child's child";
  EXPECT_EQ(workers_of_a_run(executor), 3);
}

TEST(ExecutorUnit, AForkedProcessEndsAnExecutorOfItsParent) {
  if (!kMayFork) GTEST_SKIP() << "not under ThreadSanitizer";
  for (const bool runs : {false, true}) {
    auto executor = std::make_unique<Executor>(3);
    EXPECT_EQ(in_forked_child([&] {
                const int workers = runs ? workers_of_a_run(*executor) : 3;
                executor.reset();
                return workers;
              }),
              3);
  }
}

TEST(ExecutorUnit, AForkAmidARunLeavesTheChildWhole) {
  if (!kMayFork) GTEST_SKIP() << "not under ThreadSanitizer";
  Executor executor(2);
  std::atomic<bool> inside{false}, go_on{false};
  std::thread busy([&] {
    executor.run([&](int) {
      inside = true;
      while (!go_on) std::this_thread::yield();
    });
  });
  while (!inside) std::this_thread::yield();
  EXPECT_EQ(in_forked_child([&] {
              int totals[2] = {};
              std::thread other([&] { totals[1] = workers_of_a_run(executor); });
              totals[0] = workers_of_a_run(executor);
              other.join();
              return totals[0] + totals[1];
            }),
            4);
  go_on = true;
  busy.join();
}

TEST(ExecutorUnit, RefusesThreadCountsOutOfRange) {
  EXPECT_THROW(Executor(-1), InvalidArgument);
  EXPECT_THROW(Executor(1025), InvalidArgument);
}

TEST(ExecutorUnit, SharedCrewIsOne) {
  EXPECT_EQ(Executor::shared(), Executor::shared());
  EXPECT_GE(Executor::shared()->num_threads(), 1);
}

}  // namespace
}  // namespace mla
