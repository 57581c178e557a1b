#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tools/tool.hpp"

namespace mla::test {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

std::string golden(const std::string& name) {
  return std::string(MLA_GOLDEN_LAYERS) + "/" + name + ".safetensors";
}

TEST(LayerTools, PrintsTheErrorOfEachWayAsJson) {
  for (const char* dtype : {"fp32", "bf16"}) {
    const ToolResult result =
        run_tool({"layer", golden("deepseek_v3_small"), "--dtype", dtype, "--page-size", "16"});
    EXPECT_EQ(result.status, 0) << result.err;
    const auto json = nlohmann::json::parse(result.out);
    EXPECT_EQ(json.at("dtype"), dtype);
    EXPECT_EQ(json.at("tokens"), 40);
    EXPECT_TRUE(json.at("passed"));
    for (const char* way : {"one_pass", "chunks", "token_by_token"}) {
      const double error = json.at("max_rel_error").at(way);
      EXPECT_GT(error, 0) << way;
      EXPECT_LE(error, json.at("bound").get<double>()) << way;
    }
  }
}

TEST(LayerTools, KernelAndThreadsCanBeChosen) {
  const ToolResult result = run_tool({"layer", golden("nope_width_0"), "--kernel", "reference",
                                      "--threads", "1", "--page-size", "1"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out).at("kernel"), "reference");
}

// On the device where there is one; else the reason is the message.
TEST(LayerTools, CudaRunsOrSaysWhyNot) {
  const ToolResult result =
      run_tool({"layer", golden("deepseek_v3_small"), "--device", "cuda", "--dtype", "fp16"});
  if (result.status == 2) {
    EXPECT_THAT(result.err, HasSubstr("device: expected cpu: "));
    EXPECT_THAT(result.out, IsEmpty());
    return;
  }
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out).at("device"), "cuda");
}

// The same weights under another configuration: the output is finite and wrong.
TEST(LayerTools, ErrorPastTheBoundExitsWithOne) {
  const ScratchFolder folder;
  std::string bytes = read_file(golden("half_layout_yarn"));
  const std::string from = R"(\"rope_interleave\": false)";
  const size_t at = bytes.find(from);
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at, from.size(), R"(\"rope_interleave\": true )");
  const ToolResult result = run_tool({"layer", folder.write("wrong.safetensors", bytes)});
  EXPECT_EQ(result.status, 1) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_FALSE(json.at("passed"));
  EXPECT_GT(json.at("max_rel_error").at("one_pass"), json.at("bound"));
}

TEST(LayerTools, BadInputExitsWithTwoAndSaysWhat) {
  const ScratchFolder folder;
  const std::string cut =
      folder.write("cut.safetensors", read_file(golden("deepseek_v3_small")).substr(0, 100'000));
  const std::vector<std::pair<std::vector<std::string>, std::string>> bad = {
      {{"layer", "/no/such/file"}, "/no/such/file"},
      {{"layer", cut}, "data_offsets"},
      {{"layer"}, "file is required"},
      {{"layer", golden("nope_width_0"), "--dtype", "fp8"}, "--dtype"},
      {{"layer", golden("nope_width_0"), "--page-size", "0"}, "--page-size"},
      {{"layer", golden("nope_width_0"), "--kernel", "none"}, "kernel"},
      {{"layer", golden("nope_width_0"), "--device", "tpu"}, "--device"},
      {{"layer", golden("nope_width_0"), "--dtype", "fp16"}, "dtype: expected fp32 or bf16"},
  };
  for (const auto& [arguments, text] : bad) {
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.status, 2) << testing::PrintToString(arguments);
    EXPECT_THAT(result.out, IsEmpty());
    EXPECT_THAT(result.err, HasSubstr(text));
  }
}

TEST(LayerTools, AModelTypeThatIsNotTheConfigurationsIsRefusedWithBothNames) {
  const ScratchFolder folder;
  const std::string good = read_file(golden("deepseek_v3_small"));
  for (const auto& [from, to, text] :
       {std::array{R"("model_type":"deepseek_v3")", R"("model_type":"deepseek_v2")",
                   "model_type: expected deepseek_v3, as its config says, got deepseek_v2"},
        std::array{R"(\"model_type\": \"deepseek_v3\")", R"(\"model_type\": \"deepseek_v2\")",
                   "model_type: expected deepseek_v2, as its config says, got deepseek_v3"}}) {
    std::string bytes = good;
    const size_t at = bytes.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    bytes.replace(at, std::string_view(from).size(), to);
    const ToolResult result = run_tool({"layer", folder.write("other.safetensors", bytes)});
    EXPECT_EQ(result.status, 2);
    EXPECT_THAT(result.err, HasSubstr(text));
    EXPECT_THAT(result.out, IsEmpty());
  }
}

TEST(LayerTools, RefusedConfigurationIsNamed) {
  const ScratchFolder folder;
  std::string bytes = read_file(golden("deepseek_v3_small"));
  const std::string from = R"(\"attention_bias\": false)";
  bytes.replace(bytes.find(from), from.size(), R"(\"attention_bias\": true )");
  const ToolResult result = run_tool({"layer", folder.write("bias.safetensors", bytes)});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("attention_bias"));
}

}  // namespace
}  // namespace mla::test
