#include <chrono>
#include <thread>

#include "cases/problem.hpp"
#include "contract/contract.hpp"

namespace mla::contract {
namespace {

MLA_CONTRACT_SUITE_OF(CpuContract, DeviceKind::kCpu);

// vllm-project/vllm, csrc/cpu/mla_decode.cpp: the value loop ran over the whole block although
// only some rows of the scratch were filled. (Lent scratch holds NaN, then infinity.)
TEST_P(CpuContract, ScratchBeyondTheKeysIsNeverUsed) {
  for (const int32_t keys : {1, 3, 17, 63, 129}) {
    AttentionCase c{.q_lens = {1}, .kv_lens = {keys}};
    c.geometry.page_size = 16;
    expect_holds(c);
  }
}

// sgl-project/sglang, sgl-kernel/csrc/cpu/decode.cpp: exp(-inf - -inf) in the first split.
TEST_P(CpuContract, EmptyFirstSplitIsNoNan) {
  AttentionCase c{.q_lens = {1, 1}, .kv_lens = {0, 5}, .splits = {.forced_count = 4}};
  expect_holds(c);
  c.splits = {.fixed_tokens = 2};
  expect_holds(c);
}

// vllm-project/vllm PR 52616: bf16 and pages of a multiple of 32 only.
TEST_P(CpuContract, SixteenBitTypesTakeAnyPageSize) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int32_t page_size : {1, 16}) {
      AttentionCase c{.q_lens = {1, 1}, .kv_lens = {30, 47}};
      c.geometry.dtype = c.geometry.kv_dtype = dtype;
      c.geometry.page_size = page_size;
      expect_holds(c);
    }
  }
}

// vllm-project/vllm PR 49453: one path of several was wrong.
TEST_P(CpuContract, EveryKernelCanBeAskedForByName) {
  AttentionConfig config{.geometry = AttentionCase{}.geometry, .num_pages = 1};
  config.kernel = GetParam();
  EXPECT_EQ(PagedAttention(config).kernel(), GetParam());
  EXPECT_EQ(supports(config.geometry, {}, {}, GetParam()).kernel, GetParam());
}

// What is chosen is what runs, and says so.
TEST(CpuKernelContract, FirstKernelThatAcceptsServesTheShape) {
  const Geometry geometry = AttentionCase{}.geometry;
  const Support support = supports(geometry);
  ASSERT_TRUE(support);
  for (const KernelVerdict& verdict : support.considered) {
    if (verdict.refusal.empty()) {
      EXPECT_EQ(verdict.kernel, support.kernel);
      break;
    }
  }
  EXPECT_EQ(PagedAttention({.geometry = geometry, .num_pages = 1}).kernel(), support.kernel);
}

// sgl-project/sglang issue 11044: the AVX-512 path was compiled only together with AMX. Here each
// path is chosen by exactly what it needs: one that the processor has is never refused for another.
TEST(CpuKernelContract, Avx512RunsWhereTheProcessorHasIt) {
#if defined(__x86_64__)
  const Support support = supports(AttentionCase{}.geometry);
  for (const KernelVerdict& verdict : support.considered) {
    const bool has_avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (verdict.kernel == "cpu_avx512" && has_avx512) {
      EXPECT_EQ(verdict.refusal, "");
      EXPECT_EQ(support.kernel, "cpu_avx512");
    }
    if (verdict.kernel == "cpu_avx2" && __builtin_cpu_supports("avx2") &&
        __builtin_cpu_supports("fma")) {
      EXPECT_EQ(verdict.refusal, "");
    }
  }
#else
  GTEST_SKIP() << "not an x86-64 processor";
#endif
}

// vllm-project/vllm, csrc/cpu/mla_decode.cpp: one long request ran on one core.
TEST_P(CpuContract, OneRequestIsSharedOutOverTheThreads) {
  AttentionCase c{.q_lens = {1}, .kv_lens = {4096}, .kernel = GetParam(), .device = device()};
  c.geometry.num_heads = 1;  // not enough rows to share by head
  cases::Problem problem(c);
  AttentionConfig config = problem.config();
  config.executor = std::make_shared<Executor>(8);
  PagedAttention attention(config);
  attention.plan(problem.batch(), cases::Problem::options_of(c));
  EXPECT_GE(attention.info().num_splits, 8);
  EXPECT_EQ(cases::check_problem(problem, {.executor = config.executor}).fault, "");
}

TEST_P(CpuContract, NumberOfThreadsIsFree) {
  for (const int threads : {1, 2, 3, 7}) {
    AttentionCase c{.q_lens = {1, 9, 0, 2}, .kv_lens = {700, 20, 5, 64}, .causal = true};
    c.geometry.num_heads = 2;
    c.kernel = GetParam();
    const auto executor = std::make_shared<Executor>(threads);
    EXPECT_EQ(cases::check_case(c, {.executor = executor}).fault, "") << threads;
  }
}

// Two objects are independent, whether they share threads or not.
TEST_P(CpuContract, ObjectsMayRunAtOnce) {
  const auto shared = std::make_shared<Executor>(2);
  std::vector<std::string> faults(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < faults.size(); ++i) {
    threads.emplace_back([&, i] {
      AttentionCase c{.q_lens = {1, 3}, .kv_lens = {200, 50}, .causal = true, .seed = i};
      c.geometry.num_heads = 2;
      c.kernel = GetParam();
      const auto executor = i % 2 == 0 ? shared : std::make_shared<Executor>(1);
      for (int round = 0; round < 5; ++round) {
        faults[i] += cases::check_case(c, {.executor = executor}).fault;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& fault : faults) EXPECT_EQ(fault, "");
}

}  // namespace
}  // namespace mla::contract
