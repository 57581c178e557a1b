#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/page_numbers.hpp"
#include "device/staging.hpp"
#include "mla/error.hpp"

// Plans and runs on streams of a GPU that is behind: what a run sees is its own plan, and nothing
// waits or takes memory.
namespace mla::cuda {
namespace {

using namespace std::chrono_literals;
using Rows = std::vector<NumberedRow>;

constexpr int kDepth = device::StagedBuffer::kDepth;

class CudaPlan : public CudaTest, public testing::WithParamInterface<DType> {
 protected:
  static Rows one_page(int32_t page) { return {{.pages = {page}}}; }
};

INSTANTIATE_TEST_SUITE_P(, CudaPlan, testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& dtype) { return std::string(name_of(dtype.param)); });

// The race of mstar PR 243, rtp-llm PR 1254, vllm PR 32799: the host is far ahead of the copies.
TEST_P(CudaPlan, PlansBehindABlockedStreamReachTheirOwnRuns) {
  const PageNumbers numbers(GetParam(), 64, 1);
  PagedAttention attention(numbers.config(4, 64));
  std::vector<DeviceMemory> outs;
  for (int i = 0; i < 12; ++i) outs.push_back(numbers.new_output());
  const DeviceStream stream(kCuda);
  Gate gate;
  std::jthread opener;
  gate.close(stream);
  for (int i = 0; i < 12; ++i) {
    if (i == kDepth) {
      EXPECT_FALSE(gate.is_open()) << "the ring is deep enough for these";
      opener = gate.open_after(100ms);  // the next plan waits for the first one's copy
    }
    PageNumbers::plan(attention, one_page(i + 1), stream);
    attention.run(numbers.args(outs[i], 1), stream);
  }
  EXPECT_TRUE(gate.is_open()) << "a plan overtook " << kDepth << " copies";
  stream.synchronize();
  for (int i = 0; i < 12; ++i) numbers.expect_means(outs[i], one_page(i + 1));
}

TEST_P(CudaPlan, APlanWaitsOnTheDeviceForTheRunsBeforeIt) {
  const PageNumbers numbers(GetParam(), 64, 1);
  PagedAttention attention(numbers.config(4, 64));
  std::vector<DeviceMemory> outs;
  for (int i = 0; i < kDepth; ++i) outs.push_back(numbers.new_output());
  const DeviceStream planning(kCuda), running(kCuda);
  Gate gate;
  gate.close(running);
  for (int i = 0; i < kDepth; ++i) {
    PageNumbers::plan(attention, one_page(i + 1), planning);
    attention.run(numbers.args(outs[i], 1), running);
  }
  EXPECT_FALSE(gate.is_open()) << "the host waited";
  gate.open();
  running.synchronize();
  for (int i = 0; i < kDepth; ++i) numbers.expect_means(outs[i], one_page(i + 1));
}

TEST_P(CudaPlan, ARunWaitsOnTheDeviceForItsPlan) {
  const PageNumbers numbers(GetParam(), 64, 1);
  PagedAttention attention(numbers.config(4, 64));
  const DeviceMemory out = numbers.new_output();
  const DeviceStream planning(kCuda), running(kCuda);
  PageNumbers::plan(attention, one_page(3), planning);
  planning.synchronize();
  Gate gate;
  gate.close(planning);
  PageNumbers::plan(attention, one_page(5), planning);
  attention.run(numbers.args(out, 1), running);
  EXPECT_EQ(cudaStreamQuery(static_cast<cudaStream_t>(running.get().handle)), cudaErrorNotReady);
  cudaGetLastError();
  gate.open();
  running.synchronize();
  numbers.expect_means(out, one_page(5));
}

// They share the object's scratch, so the library puts them one behind the other.
TEST_P(CudaPlan, RunsOfOneObjectOnTwoStreamsTakeTurns) {
  const PageNumbers numbers(GetParam(), 4096, 4);
  AttentionConfig config = numbers.config(4, 8192);
  config.splits.forced_count = 16;
  PagedAttention attention(config);
  std::vector<DeviceMemory> outs;
  for (int i = 0; i < 6; ++i) outs.push_back(numbers.new_output());
  const DeviceStream streams[] = {DeviceStream(kCuda), DeviceStream(kCuda)};
  Gate gate;
  gate.close(streams[0]);
  std::vector<Rows> rows;
  for (int i = 0; i < 6; ++i) {
    if (i % 2 == 0) {
      rows.push_back(random_rows(i, 1, 4096, 4000));
      rows.back()[0].num_queries = 4;
      PageNumbers::plan(attention, rows.back(), streams[i / 2 % 2]);
    } else {
      rows.push_back(rows.back());
    }
    attention.run(numbers.args(outs[i], 4), streams[i % 2]);
  }
  EXPECT_EQ(cudaStreamQuery(static_cast<cudaStream_t>(streams[1].get().handle)), cudaErrorNotReady);
  cudaGetLastError();
  gate.open();
  for (const DeviceStream& stream : streams) stream.synchronize();
  for (int i = 0; i < 6; ++i) numbers.expect_means(outs[i], rows[i]);
}

TEST_P(CudaPlan, TwoObjectsRunOnTwoStreamsAtOnce) {
  constexpr int kRounds = 30;
  const PageNumbers numbers(GetParam(), 4096, 64);
  struct Lane {
    PagedAttention attention;
    DeviceStream stream{kCuda};
    std::vector<DeviceMemory> outs{};
    std::vector<Rows> rows{};
  };
  std::vector<Lane> lanes;
  for (int lane = 0; lane < 2; ++lane) {
    lanes.push_back({.attention = PagedAttention(numbers.config(16, 1 << 16))});
    for (int i = 0; i < kRounds; ++i) lanes.back().outs.push_back(numbers.new_output());
  }
  for (int i = 0; i < kRounds; ++i) {
    for (size_t lane = 0; lane < 2; ++lane) {
      Lane& at = lanes[lane];
      at.rows.push_back(random_rows(100 * lane + i, 1 + i % 16, 4096, 3000));
      PageNumbers::plan(at.attention, at.rows.back(), at.stream);
      at.attention.run(numbers.args(at.outs[i], num_tokens(at.rows.back())), at.stream);
    }
  }
  for (const Lane& lane : lanes) {
    lane.stream.synchronize();
    for (int i = 0; i < kRounds; ++i) {
      SCOPED_TRACE("round " + std::to_string(i));
      numbers.expect_means(lane.outs[i], lane.rows[i]);
    }
  }
}

TEST_P(CudaPlan, SteadyPlansAndRunsTakeNoMemoryAndDoNotWait) {
  const PageNumbers numbers(GetParam(), 4096, 64);
  PagedAttention attention(numbers.config(16, 1 << 16));
  const DeviceMemory out = numbers.new_output();
  const DeviceStream stream(kCuda);
  const Rows rows = random_rows(1, 16, 4096, 3000);
  const auto plan_and_run = [&](int num_runs) {
    PageNumbers::plan(attention, rows, stream);
    for (int i = 0; i < num_runs; ++i) {
      attention.run(numbers.args(out, num_tokens(rows)), stream);
    }
  };
  for (int i = 0; i < 2 * kDepth; ++i) plan_and_run(1);
  stream.synchronize();
  // The card's other users take and give memory too, but not in every short round; ours would.
  bool is_steady = false;
  for (int round = 0; round < 100 && !is_steady; ++round) {
    size_t before = 0, after = 0, all = 0;
    ASSERT_EQ(cudaMemGetInfo(&before, &all), cudaSuccess);
    for (int i = 0; i < 100; ++i) plan_and_run(3);
    stream.synchronize();
    ASSERT_EQ(cudaMemGetInfo(&after, &all), cudaSuccess);
    is_steady = after == before;
  }
  EXPECT_TRUE(is_steady) << "memory was taken in every round";
  Gate gate;
  gate.close(stream);
  for (int i = 0; i < kDepth; ++i) plan_and_run(20);
  EXPECT_FALSE(gate.is_open()) << "the host waited";
  gate.open();
  stream.synchronize();
  numbers.expect_means(out, rows);
}

TEST_P(CudaPlan, RefusedInputLeavesTheContextAndThePlanWell) {
  const PageNumbers numbers(GetParam(), 64, 4);
  PagedAttention attention(numbers.config(4, 64));
  const DeviceMemory out = numbers.new_output();
  const DeviceStream stream(kCuda);
  PageNumbers::plan(attention, one_page(9), stream);
  EXPECT_THROW(PageNumbers::plan(attention, one_page(64), stream), InvalidArgument) << "no page";
  EXPECT_THROW(PageNumbers::plan(attention, Rows(5), stream), InvalidArgument) << "rows";
  RunArgs wrong = numbers.args(out, 2);
  EXPECT_THROW(attention.run(wrong, stream), InvalidArgument) << "tokens";
  wrong = numbers.args(out, 1);
  wrong.q_nope.device = Device{};
  EXPECT_THROW(attention.run(wrong, stream), InvalidArgument) << "device";
  wrong = numbers.args(out, 1);
  wrong.out.data = nullptr;
  EXPECT_THROW(attention.run(wrong, stream), InvalidArgument) << "null";
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  attention.run(numbers.args(out, 1), stream);
  stream.synchronize();
  numbers.expect_means(out, one_page(9));
}

// An error of the caller's that nobody has read is not a failure of our launches.
TEST_P(CudaPlan, ARunPassesOverAnErrorThatWasThereBefore) {
  const PageNumbers numbers(GetParam(), 64, 1);
  AttentionConfig config = numbers.config(4, 64);
  config.splits.forced_count = 2;  // so that parts are merged
  PagedAttention attention(config);
  const DeviceMemory out = numbers.new_output();
  const Rows rows = {{.pages = {3, 4, 5, 9}}};
  PageNumbers::plan(attention, rows, {});
  void* nothing = nullptr;
  const cudaError_t error = cudaMalloc(&nothing, size_t{1} << 50);
  ASSERT_NE(error, cudaSuccess) << "that much memory";
  attention.run(numbers.args(out, 1));
  EXPECT_EQ(cudaGetLastError(), error) << "it is the caller's to read";
  synchronize(kCuda);
  numbers.expect_means(out, rows);
}

// More rows and requests than a grid's y and z may have.
TEST_P(CudaPlan, SeventyThousandQueriesAndSeventeenThousandRequestsAreServed) {
  const PageNumbers numbers(GetParam(), 64, 70000);
  const DeviceMemory out = numbers.new_output();
  PagedAttention attention(numbers.config(17000, 1 << 16));
  Rows requests(17000);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i] = {.pages = std::vector<int32_t>(i % 3, static_cast<int32_t>(i % 64)),
                   .num_queries = 1 + static_cast<int32_t>(i % 4)};
  }
  for (const Rows& rows : {Rows{{.pages = {7, 8, 9}, .num_queries = 70000}}, requests}) {
    PageNumbers::plan(attention, rows, {});
    attention.run(numbers.args(out, num_tokens(rows)));
    synchronize(kCuda);
    numbers.expect_means(out, rows);
  }
}

// deepseek-ai/FlashMLA PR 160: the device is the object's, whatever the thread's current one is.
TEST_P(CudaPlan, TheObjectsDeviceIsUsedAndTheThreadsStaysCurrent) {
  int count = 0;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  if (count < 2) GTEST_SKIP() << "one GPU only";
  const PageNumbers numbers(GetParam(), 64, 1);
  const DeviceMemory out = numbers.new_output();
  const DeviceStream stream(kCuda);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  PagedAttention attention(numbers.config(4, 64));
  PageNumbers::plan(attention, one_page(11), stream);
  attention.run(numbers.args(out, 1), stream);
  stream.synchronize();
  int current = 0;
  EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 1);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  numbers.expect_means(out, one_page(11));
}

}  // namespace
}  // namespace mla::cuda
