#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include "mla/bench_shapes.hpp"

namespace mla::cli {
namespace {

int64_t total_tokens(const BenchShape& shape) {
  const auto& kv_lens = shape.attention_case.kv_lens;
  return std::accumulate(kv_lens.begin(), kv_lens.end(), int64_t{0});
}

TEST(BenchShapesUnit, GroupsOfTheGpuAreComplete) {
  std::map<std::string, int> counts;
  for (const BenchShape& shape : gpu_bench_shapes()) ++counts[shape.group];
  EXPECT_EQ(counts.at("grid"), 57);
  EXPECT_EQ(counts.at("heads"), 8);
  EXPECT_EQ(counts.at("pages"), 8);
  EXPECT_EQ(counts.at("latent"), 2);
  EXPECT_EQ(counts.at("general"), 37);
}

TEST(BenchShapesUnit, UnevenLengthsAreThoseOfTheGenerator) {
  for (const BenchShape& shape : gpu_bench_shapes()) {
    if (shape.group != "grid") continue;
    if (shape.attention_case.name.find("log-normal") == std::string::npos) continue;
    EXPECT_EQ(total_tokens(shape), shape.attention_case.num_rows() == 32 ? 209751 : 500691);
  }
}

TEST(BenchShapesUnit, TheGeneralKernelIsNamedForItsShapes) {
  for (const BenchShape& shape : gpu_bench_shapes()) {
    const bool general = shape.group == "general";
    EXPECT_EQ(shape.attention_case.kernel, general ? "cuda_tensor_core" : "");
    if (general) {
      EXPECT_GE(total_tokens(shape), 131072);
    }
  }
}

// The CPU stands for a card without tensor cores.
TEST(BenchShapesUnit, ShapesOfAKernelThatADeviceLacksAreSkippedWithALine) {
  std::vector<BenchShape> shapes = gpu_bench_shapes();
  const auto is_general = [](const BenchShape& shape) { return shape.group == "general"; };
  const auto general = std::ranges::count_if(shapes, is_general);
  const size_t others = shapes.size() - static_cast<size_t>(general);
  EXPECT_EQ(drop_unserved(shapes, Device{}),
            std::vector{std::to_string(general) +
                        " shapes are skipped, general: cpu has no kernel \"cuda_tensor_core\""});
  EXPECT_EQ(shapes.size(), others);
  EXPECT_TRUE(std::ranges::none_of(shapes, is_general));
}

TEST(BenchShapesUnit, MatrixUnitsCountTilesOf64Rows) {
  for (const BenchShape& shape : gpu_bench_shapes()) {
    const cases::AttentionCase& c = shape.attention_case;
    const double rows = static_cast<double>(c.geometry.num_heads) * c.q_lens[0];
    EXPECT_DOUBLE_EQ(shape.matrix_flops(), shape.flops() * (rows < 64 ? 64 / rows : 1));
  }
}

}  // namespace
}  // namespace mla::cli
