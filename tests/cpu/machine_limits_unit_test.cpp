#include <gtest/gtest.h>

#include <string>

#include "cpu/machine_limits.hpp"
#include "cpu/tile_problem.hpp"

namespace mla::cpu {
namespace {

TEST(MachineLimitsUnit, EveryIsaHasARateAMachineCouldHave) {
  Executor executor(1);
  for (const AttentionImpl* impl : simd_impls()) {
    const double gflops = measure_fma_gflops(impl->name, executor);
    EXPECT_GT(gflops, 0.05) << impl->name;  // an emulated CPU
    EXPECT_LT(gflops, 1000) << impl->name;  // 6 GHz x 4 units x 16 lanes x 2
  }
}

TEST(MachineLimitsUnit, CachesAreFasterThanMemoryAndBothAreFinite) {
  Executor executor(2);
  const MachineLimits limits = measure_limits(simd_impls().front()->name, executor);
  EXPECT_EQ(limits.threads, 2);
  EXPECT_GT(limits.fma_gflops, 0.05);
  EXPECT_GT(limits.dram_read_gbps, 0.1);
  EXPECT_GT(limits.l2_read_gbps, limits.dram_read_gbps / 2);  // both are noisy on a shared machine
  EXPECT_LT(limits.l2_read_gbps, 10000);
}

}  // namespace
}  // namespace mla::cpu
