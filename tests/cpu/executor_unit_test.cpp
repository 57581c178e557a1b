#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
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
