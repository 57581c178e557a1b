#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "mla/trace.hpp"
#include "mla/usage_error.hpp"

namespace mla::cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<TraceRequest> read(const std::string& text, int64_t max_requests = INT64_MAX) {
  std::istringstream lines(text);
  return read_trace(lines, "t.jsonl", max_requests);
}

std::string refusal_of(const std::string& text) {
  try {
    read(text);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

const std::string kGood =
    R"({"timestamp": 0, "input_length": 513, "output_length": 2, "hash_ids": [7, 8]})";

TEST(TraceUnit, ReadsEveryField) {
  const auto trace = read(kGood + "\n" +
                          R"({"timestamp": 27.5, "input_length": 1, "output_length": 1,)"
                          R"( "hash_ids": [18446744073709551615], "other": {"a": [1]}})");
  ASSERT_EQ(trace.size(), 2U);
  EXPECT_EQ(trace[0].timestamp_ms, 0);
  EXPECT_EQ(trace[0].input_length, 513);
  EXPECT_EQ(trace[0].output_length, 2);
  EXPECT_THAT(trace[0].hash_ids, ElementsAre(7, 8));
  EXPECT_EQ(trace[1].timestamp_ms, 27.5);
  EXPECT_THAT(trace[1].hash_ids, ElementsAre(UINT64_MAX));
}

TEST(TraceUnit, BlankLinesAndCarriageReturnsArePassedOver) {
  EXPECT_EQ(read("\n" + kGood + "\r\n  \t\r\n" + kGood + "\n\n").size(), 2U);
}

TEST(TraceUnit, StopsAfterMaxRequestsWithoutLookingFurther) {
  EXPECT_EQ(read(kGood + "\n" + kGood + "\nnot json", 2).size(), 2U);
}

TEST(TraceUnit, RefusalNamesTheLine) {
  EXPECT_THAT(refusal_of(kGood + "\n\n{\"timestamp\": 0,,}\n"), HasSubstr("t.jsonl:3: not JSON"));
  EXPECT_THAT(refusal_of(kGood + "\n" + kGood.substr(0, 40)), HasSubstr("t.jsonl:2: not JSON"));
  EXPECT_THAT(refusal_of(R"({"timestamp": 1e400})"), HasSubstr("t.jsonl:1: a number in it"));
  EXPECT_THAT(refusal_of("[1, 2]"), HasSubstr("t.jsonl:1: request: expected an object"));
}

TEST(TraceUnit, FieldThatALineHasTwiceIsRefusedWithItsLine) {
  const std::string again = kGood.substr(0, kGood.size() - 1) + R"(, "output_length": 3})";
  EXPECT_EQ(refusal_of(kGood + "\n" + again),
            "t.jsonl:2: \"output_length\": expected each field once, got it again");
  const std::string inner = kGood.substr(0, kGood.size() - 1) + R"(, "o": [{"a": 1, "a": 2}]})";
  EXPECT_THAT(refusal_of(inner), HasSubstr("t.jsonl:1: \"a\""));
  const std::string apart = kGood.substr(0, kGood.size() - 1) + R"(, "o": [{"a": 1}, {"a": 2}]})";
  EXPECT_EQ(read(apart).size(), 1U) << "equal names in two objects";
}

TEST(TraceUnit, TraceWithoutRequestsIsRefused) {
  EXPECT_THAT(refusal_of(""), HasSubstr("t.jsonl: no request"));
  EXPECT_THAT(refusal_of("\n \n"), HasSubstr("t.jsonl: no request"));
}

struct BadField {
  const char* field;
  const char* value;  // null: the field is missing
};

class TraceFieldUnit : public testing::TestWithParam<BadField> {};

TEST_P(TraceFieldUnit, RefusalNamesTheField) {
  const auto [field, value] = GetParam();
  std::string line;
  for (const auto& [name, good] :
       std::vector<std::pair<std::string, std::string>>{{"timestamp", "0"},
                                                        {"input_length", "513"},
                                                        {"output_length", "1"},
                                                        {"hash_ids", "[1, 2]"}}) {
    const bool bad = name == field;
    if (bad && value == nullptr) continue;
    line += (line.empty() ? "{\"" : ", \"") + name + "\": " + (bad ? value : good);
  }
  EXPECT_THAT(refusal_of(kGood + "\n" + line + "}"), HasSubstr(std::string("t.jsonl:2: ") + field));
}

INSTANTIATE_TEST_SUITE_P(
    All, TraceFieldUnit,
    testing::Values(BadField{"timestamp", nullptr}, BadField{"timestamp", "-1"},
                    BadField{"timestamp", "\"0\""}, BadField{"timestamp", "null"},
                    BadField{"input_length", nullptr}, BadField{"input_length", "0"},
                    BadField{"input_length", "-5"}, BadField{"input_length", "513.0"},
                    BadField{"input_length", "1073741825"},
                    BadField{"input_length", "18446744073709551616"},
                    BadField{"input_length", "true"}, BadField{"output_length", nullptr},
                    BadField{"output_length", "0"}, BadField{"output_length", "[1]"},
                    BadField{"hash_ids", nullptr}, BadField{"hash_ids", "[1]"},
                    BadField{"hash_ids", "[1, 2, 3]"}, BadField{"hash_ids", "[1, -2]"},
                    BadField{"hash_ids", "[1, 2.5]"}, BadField{"hash_ids", "[1, \"\\u00ff\"]"},
                    BadField{"hash_ids", "7"}));

TEST(TraceUnit, RefusalSaysWhatWasExpectedAndWhatCame) {
  const std::string line =
      R"({"timestamp": 0, "input_length": 1025, "output_length": 1, "hash_ids": [1, 2]})";
  EXPECT_EQ(refusal_of(line),
            "t.jsonl:1: hash_ids: expected 3 ids, one for each 512 tokens of input_length 1025, "
            "got 2");
}

TEST(TraceUnit, FileThatCannotBeReadIsRefusedByName) {
  EXPECT_THROW(read_trace_file("/no/such/trace.jsonl"), UsageError);
  EXPECT_THROW(read_trace_file("/"), UsageError);
}

}  // namespace
}  // namespace mla::cli
