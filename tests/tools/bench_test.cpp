#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tools/tool.hpp"

namespace mla::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(BenchTools, EveryResultIsCheckedAndHasARateAndAShare) {
  const ToolResult result = run_tool(
      {"bench", "--quick", "--filter", "latent", "--threads", "1", "--note", "a note", "--json"});
  ASSERT_EQ(result.status, 0) << result.err;
  const json report = json::parse(result.out);
  EXPECT_EQ(report.at("note"), "a note");
  ASSERT_EQ(report.at("roofs").size(), 1U);
  EXPECT_GT(report.at("roofs")[0].at("fp32_gflops"), 0);
  EXPECT_EQ(report.at("results").size(), 3U);
  for (const json& shape : report.at("results")) {
    EXPECT_EQ(shape.at("threads"), 1);
    EXPECT_EQ(shape.at("fault"), "");
    EXPECT_GT(shape.at("max_abs_error"), 0);
    EXPECT_GT(shape.at("median_us"), 0);
    EXPECT_LE(shape.at("first_quartile_us"), shape.at("median_us"));
    EXPECT_LE(shape.at("median_us"), shape.at("third_quartile_us"));
    EXPECT_GT(shape.at("share_of_roof"), 0);
    EXPECT_GT(shape.at("gbytes_per_s"), 0);
  }
}

TEST(BenchTools, ThreadCountsAreMeasuredSideBySide) {
  const ToolResult result = run_tool(
      {"bench", "--quick", "--filter", "64+16", "--threads", "2,1", "--kernel", "cpu_scalar"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("of the roof"));
  EXPECT_THAT(result.out, HasSubstr("fp32 roof on 1 threads"));
  EXPECT_THAT(result.out, HasSubstr("fp32 roof on 2 threads"));
}

TEST(BenchTools, WrongArgumentsAreRefused) {
  const std::vector<std::vector<std::string>> wrong = {
      {"bench", "--filter", "nothing like it"},
      {"bench", "--rounds", "0"},
      {"bench", "--threads", "0"},
      {"bench", "--kernel", "nonsense"},
      {"bench", "--calibrate"},
      {"bench", "--peer", "any.so"},
      {"bench", "--device", "cuda", "--peer", "no/such/peer.so"}};
  for (const auto& arguments : wrong) {
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.status, 2) << testing::PrintToString(arguments);
    EXPECT_THAT(result.out, IsEmpty());
  }
}

// Not taken and forgotten: the message names what does not go together.
TEST(BenchTools, OptionsThatWouldHaveNoEffectAreRefused) {
  const std::vector<std::string> calibrate = {"bench", "--device", "cuda", "--calibrate"};
  for (const std::vector<std::string>& option : std::vector<std::vector<std::string>>{
           {"--filter", "decode"}, {"--kernel", "sm90_dense"}, {"--peer", "any.so"}}) {
    std::vector<std::string> arguments = calibrate;
    arguments.insert(arguments.end(), option.begin(), option.end());
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.status, 2);
    EXPECT_THAT(result.err, HasSubstr(option[0] + " excludes --calibrate"));
  }
  const ToolResult result = run_tool({"bench", "--device", "cuda", "--threads", "2"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("--threads: they are of the CPU, and --device is cuda"));
}

}  // namespace
}  // namespace mla::test
