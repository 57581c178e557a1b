#include <gtest/gtest.h>

#include <algorithm>

#include "layer/bucket_steps.hpp"
#include "layer/golden.hpp"

// Layer files made with public implementations in float64; see golden/README.md.
namespace mla::cases {
namespace {

struct Ways : testing::TestWithParam<std::tuple<std::string, DType, int32_t>> {};

TEST_P(Ways, EachWayThroughTheCacheGivesTheFilesOutput) {
  const auto& [name, dtype, page_size] = GetParam();
  expect_every_way(name, {.dtype = dtype, .page_size = page_size});
}

INSTANTIATE_TEST_SUITE_P(LayerGolden, Ways,
                         testing::Combine(testing::ValuesIn(golden_names()),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(1, 16, 64)),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" +
                                  std::string(name_of(std::get<1>(test.param))) + "_page" +
                                  std::to_string(std::get<2>(test.param));
                         });

struct Files : testing::TestWithParam<std::string> {};

TEST_P(Files, SoftmaxScaleIsTheOneThatTheModuleUsed) {
  const LayerFile file = open_golden(GetParam());
  EXPECT_NEAR(file.config.sm_scale / file.scaling, 1, 1e-6);
}

// The reference kernel in place of the one that serves the shape.
TEST_P(Files, ReferenceKernelGivesTheFilesOutput) {
  const LayerFile file = open_golden(GetParam());
  const LayerRun run{.dtype = DType::kFloat32, .kernel = "reference"};
  EXPECT_LE(max_rel_error(file, run_layer(file, run, in_chunks(file))[0]), 2e-4);
}

TEST_P(Files, PaddedStepsUnderABucketGiveTheFilesOutput) {
  const LayerFile file = open_golden(GetParam());
  EXPECT_LE(max_rel_error(file, run_under_a_bucket(file, {})), 2e-4);
}

TEST_P(Files, RanksOfHeadsAddUpToTheWholeLayer) {
  const LayerFile file = open_golden(GetParam());
  std::vector<float> sum(file.expected.size(), 0);
  for (const HeadRange heads : {HeadRange{0, 1}, HeadRange{1, 2}, HeadRange{3, 1}}) {
    const LayerRun run{.dtype = DType::kFloat32, .heads = heads};
    const auto part = run_layer(file, run, in_chunks(file))[0];
    std::ranges::transform(part, sum, sum.begin(), std::plus());
  }
  EXPECT_LE(max_rel_error(file, sum), 2e-4);
}

// The bounds would be worth little if an error of this size passed.
TEST_P(Files, OtherPairsOfTheRopePartAreBeyondTheBounds) {
  LayerFile file = open_golden(GetParam());
  RopeLayout& layout = file.config.rope.layout;
  if (file.config.qk_rope_head_dim == 0) return;  // nothing can turn
  layout = layout == RopeLayout::kInterleaved ? RopeLayout::kHalf : RopeLayout::kInterleaved;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const auto output = run_layer(file, {.dtype = dtype}, one_pass(file))[0];
    EXPECT_GT(max_rel_error(file, output), error_bound(file, dtype)) << name_of(dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(LayerGolden, Files, testing::ValuesIn(golden_names()),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace mla::cases
