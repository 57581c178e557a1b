#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tools/tool.hpp"

namespace mla::test {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

const std::string kExamples = MLA_EXAMPLE_CASES;

TEST(CaseTools, ExamplesThatHoldExitWithZero) {
  for (const std::string name : {"ragged_decode", "strided_splits"}) {
    const ToolResult result = run_tool({"case", kExamples + "/" + name + ".json"});
    EXPECT_EQ(result.status, 0) << result.err << result.out;
    EXPECT_THAT(result.out, HasSubstr("kernel "));
    EXPECT_THAT(result.out, HasSubstr("\nok\n"));
    EXPECT_THAT(result.err, IsEmpty());
  }
}

TEST(CaseTools, RefusalGivesTheLibrarysWordsAndExitsWithTwo) {
  const ToolResult result = run_tool({"case", kExamples + "/refused_page.json"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.out, IsEmpty());
  EXPECT_THAT(result.err, HasSubstr("refused: PagedAttention::plan: kv_indices[1]: expected 0 to "
                                    "7, the pool's pages, got 8"));
}

TEST(CaseTools, JsonHoldsTheResultOrTheRefusal) {
  ToolResult result = run_tool({"case", kExamples + "/ragged_decode.json", "--json"});
  auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json.at("status"), "ok");
  EXPECT_EQ(json.at("checked_rows"), 7 * 16);
  EXPECT_GT(json.at("max_abs_error").get<double>(), 0);
  EXPECT_LE(json.at("worst_share_of_bound").get<double>(), 1);
  result = run_tool({"case", kExamples + "/refused_page.json", "--json"});
  json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json.at("status"), "refused");
  EXPECT_EQ(json.at("refusal").at("what"), "kv_indices[1]");
}

TEST(CaseTools, FilesThatCannotBeServedExitWithTwoAndSayWhere) {
  const ScratchFolder folder;
  const std::string broken = folder.write("broken.json", "{\n  \"seed\": 1,\n  oops\n}\n");
  ToolResult result = run_tool({"case", broken});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("broken.json"));
  EXPECT_THAT(result.err, HasSubstr("line 3"));
  result = run_tool({"case", folder.write("unknown.json", "{\"kv_lengths\": []}")});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("unknown.json"));
  result = run_tool({"case", folder.path("absent.json")});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("absent.json"));
  result = run_tool({"case", folder.path(".")});
  EXPECT_EQ(result.status, 2);
  EXPECT_EQ(run_tool({"case"}).status, 2);
}

}  // namespace
}  // namespace mla::test
