#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "mla/version.hpp"
#include "tools/tool.hpp"

namespace mla::test {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

TEST(CommandLineTools, VersionIsTheLibrarys) {
  const ToolResult result = run_tool({"--version"});
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.out, std::string(version()) + "\n");
}

TEST(CommandLineTools, HelpGoesToStandardOutput) {
  const ToolResult result = run_tool({"--help"});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.out, HasSubstr("doctor"));
  EXPECT_THAT(result.err, IsEmpty());
}

TEST(CommandLineTools, WrongArgumentsExitWithTwoAndSayNothingOnStandardOutput) {
  const std::vector<std::vector<std::string>> wrong = {
      {}, {"nonsense"}, {"doctor", "--no-such-option"}, {"doctor", "extra"}};
  for (const auto& arguments : wrong) {
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.status, 2) << testing::PrintToString(arguments);
    EXPECT_THAT(result.out, IsEmpty());
    EXPECT_FALSE(result.err.empty());
  }
}

TEST(CommandLineTools, JsonFileIsRefusedBeforeWorkWhereItCannotBeWritten) {
  const ToolResult result = run_tool({"doctor", "--json", "/no/such/folder/out.json"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("/no/such/folder/out.json"));
}

TEST(DoctorTools, DescribesTheMachine) {
  const ScratchFolder folder;
  const ToolResult result = run_tool({"doctor", "--json", folder.path("doctor.json")});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr(version()));
  EXPECT_THAT(folder.names(), testing::ElementsAre("doctor.json"));
  const auto json = nlohmann::json::parse(read_file(folder.path("doctor.json")));
  EXPECT_EQ(json.at("version"), version());
  EXPECT_GE(json.at("machine").at("usable_cores").get<int>(), 1);
  EXPECT_GT(json.at("machine").at("memory_bytes").get<int64_t>(), 0);
}

TEST(DoctorTools, SaysWhichKernelServesEveryModelAndThatItIsRight) {
  const ToolResult result = run_tool({"doctor", "--json"});
  ASSERT_EQ(result.status, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_TRUE(json.at("ok"));
  EXPECT_GE(json.at("models").size(), 8U);
  for (const auto& model : json.at("models")) {
    EXPECT_NE(model.at("kernel"), "") << model;
    EXPECT_NE(model.at("reason"), "") << model;
  }
  int checked_kernels = 0;
  for (const auto& kernel : json.at("kernels")) {
    if (!kernel.at("runs")) {
      EXPECT_NE(kernel.at("refusal"), "") << kernel;
      continue;
    }
    ++checked_kernels;
    EXPECT_TRUE(kernel.at("ok")) << kernel;
    EXPECT_GT(kernel.at("checked_rows"), 100) << kernel;
    EXPECT_LE(kernel.at("max_bound_share"), 1) << kernel;
  }
  EXPECT_GE(checked_kernels, 1);
}

TEST(DoctorTools, JsonWithoutAFileStandsAloneOnStandardOutput) {
  const ToolResult result = run_tool({"doctor", "--json"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out).at("version"), version());
}

}  // namespace
}  // namespace mla::test
