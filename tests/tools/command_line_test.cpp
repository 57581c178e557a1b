#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

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

TEST(CommandLineTools, CommandThatThereIsNotIsNamed) {
  EXPECT_THAT(run_tool({"foo"}).err, HasSubstr("foo"));
  EXPECT_THAT(run_tool({"foo", "--bar"}).err, HasSubstr("foo"));
  EXPECT_THAT(run_tool({}).err, HasSubstr("A command is required"));
}

// Every number option goes through the same two checks.
TEST(CommandLineTools, NumbersAreRefusedWhereTheyDoNotFitNeitherClampedNorGuessedAt) {
  const std::vector<std::vector<std::string>> options = {{"replay", "trace", "--seed"},
                                                         {"replay", "trace", "--requests"},
                                                         {"case", "file", "--rows"},
                                                         {"bench", "--threads"},
                                                         {"layer", "file", "--page-size"}};
  for (const auto& option : options) {
    for (const char* number :
         {"18446744073709551616", "-1", "0x10", "1e3", "1.0", "", " 1", "1 "}) {
      std::vector<std::string> arguments = option;
      arguments.emplace_back(number);
      const ToolResult result = run_tool(arguments);
      EXPECT_EQ(result.status, 2) << testing::PrintToString(arguments);
      EXPECT_THAT(result.err, HasSubstr(option.back()));
      EXPECT_THAT(result.err, HasSubstr("got " + std::string(number)));
    }
  }
  for (const char* option : {"--length-scale", "--sm-scale"}) {
    for (const char* number : {"1e400", "-1e400", "nan", "inf", "1,5", "x"}) {
      const ToolResult result = run_tool({"replay", "trace", option, number});
      EXPECT_EQ(result.status, 2) << option << " " << number;
      EXPECT_THAT(result.err, HasSubstr("got " + std::string(number)));
    }
  }
}

TEST(CommandLineTools, DevicesAreCpuCudaOrCudaWithItsNumber) {
  for (const char* name : {"gpu", "cuda:", "cuda:-1", "cuda:1x", "cuda:99999999999", "cpu:0", ""}) {
    const ToolResult result = run_tool({"replay", "trace", "--device", name});
    EXPECT_EQ(result.status, 2) << name;
    EXPECT_THAT(result.err, HasSubstr("expected cpu, cuda or cuda:N, got " + std::string(name)));
  }
}

TEST(CommandLineTools, ADeviceThatIsNotThereIsRefusedInTheNameOfItsOption) {
  for (const char* command : {"replay", "bench", "layer"}) {
    std::vector<std::string> arguments = {command, "--device", "cuda:999"};
    if (command != std::string_view("bench")) arguments.emplace_back("a_file");
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.status, 2) << command;
    EXPECT_THAT(result.err, HasSubstr(std::string(command) + ": --device: expected "));
    EXPECT_THAT(result.err, HasSubstr(", got cuda:999"));
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

TEST(DoctorTools, DescribesEveryGpuOrSaysWhyThereIsNone) {
  const auto cuda = nlohmann::json::parse(run_tool({"doctor", "--json"}).out).at("cuda");
  const std::string text = run_tool({"doctor"}).out;
  if (cuda.at("devices").empty()) {
    EXPECT_NE(cuda.at("missing"), "");
    EXPECT_THAT(text, HasSubstr("no device: " + cuda.at("missing").get<std::string>()));
  }
  for (const auto& device : cuda.at("devices")) {
    EXPECT_THAT(text, HasSubstr(device.at("name")));
    EXPECT_GT(device.at("sms"), 0);
    EXPECT_GT(device.at("memory_bytes").get<int64_t>(), 0);
    for (const auto& model : device.at("models")) EXPECT_NE(model.at("kernel"), "") << model;
    for (const auto& kernel : device.at("kernels")) EXPECT_TRUE(kernel.at("ok")) << kernel;
  }
}

TEST(DoctorTools, JsonWithoutAFileStandsAloneOnStandardOutput) {
  const ToolResult result = run_tool({"doctor", "--json"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out).at("version"), version());
}

}  // namespace
}  // namespace mla::test
