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

TEST(BenchShapesUnit, MatrixUnitsCountTilesOf64Rows) {
  for (const BenchShape& shape : gpu_bench_shapes()) {
    const cases::AttentionCase& c = shape.attention_case;
    const double rows = static_cast<double>(c.geometry.num_heads) * c.q_lens[0];
    EXPECT_DOUBLE_EQ(shape.matrix_flops(), shape.flops() * (rows < 64 ? 64 / rows : 1));
  }
}

}  // namespace
}  // namespace mla::cli
