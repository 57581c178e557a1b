#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/tool.hpp"

namespace mla::test {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using Arguments = std::vector<std::string>;

// A shape that is small enough for many runs: 4 heads, 64+16.
const Arguments kSmall = {"--heads", "4",          "--kv-lora-rank", "64", "--qk-rope-head-dim",
                          "16",      "--no-limits"};

std::string line(int64_t input, int64_t output, const std::string& ids, int64_t timestamp = 0) {
  return R"({"timestamp": )" + std::to_string(timestamp) + R"(, "input_length": )" +
         std::to_string(input) + R"(, "output_length": )" + std::to_string(output) +
         R"(, "hash_ids": [)" + ids + "]}\n";
}

// 1 and 2 begin with 1's first two blocks, 3 is alone, 4 is the whole of 1 again.
const std::string kShared = line(1200, 6, "1, 2, 3") + line(1030, 4, "1, 2, 4") +
                            line(300, 1, "5") + line(1200, 9, "1, 2, 3");

class ReplayTools : public testing::Test {
 protected:
  ToolResult replay(const std::string& trace, const Arguments& more) {
    Arguments arguments = {"replay", folder_.write("trace.jsonl", trace)};
    arguments.insert(arguments.end(), kSmall.begin(), kSmall.end());
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_tool(arguments);
  }

  /// Replays and expects that every request was served, in bounds, with no page lost.
  json replayed(const std::string& trace, Arguments more = {}) {
    more.emplace_back("--json");
    const ToolResult result = replay(trace, more);
    EXPECT_EQ(result.status, 0) << result.err;
    json report = json::parse(result.out, nullptr, false);
    EXPECT_FALSE(report.is_discarded()) << result.out;
    if (report.is_discarded()) return {};
    EXPECT_EQ(report.at("requests_failed"), 0);
    EXPECT_EQ(report.at("pages_leaked"), 0);
    EXPECT_LE(report.at("max_bound_share"), 1);
    return report;
  }

  ScratchFolder folder_;
};

TEST_F(ReplayTools, CountsWhatTheTraceAsksFor) {
  const json report = replayed(kShared, {"--page-size", "16", "--token-budget", "512"});
  EXPECT_EQ(report.at("requests_finished"), 4);
  EXPECT_EQ(report.at("decode_tokens"), 5 + 3 + 0 + 8);
  EXPECT_EQ(
      report.at("prefill_tokens").get<int64_t>() + report.at("prefix_hit_tokens").get<int64_t>(),
      1200 + 1030 + 300 + 1200);
  EXPECT_GT(report.at("attention_ms"), 0);
  EXPECT_GT(report.at("checked_rows"), 0);
  EXPECT_GT(report.at("max_abs_error"), 0) << "bf16 rounds";
  EXPECT_GT(report.at("peak_pages"), 1200 / 16);
}

// One request at a time, so that what the index holds is known: of 1,030 tokens the 1,024 of the
// two equal blocks; of the same 1,200 tokens again the full pages, but for the last row.
TEST_F(ReplayTools, HitRateIsThatOfTheFullPages) {
  const struct {
    const char* page_size;
    int64_t hits;
  } cases[] = {{"1", 1024 + 1199}, {"16", 1024 + 1199}, {"64", 1024 + 1152}, {"1000", 1000 + 1000}};
  for (const auto& [page_size, hits] : cases) {
    const json report = replayed(kShared, {"--page-size", page_size, "--max-running", "1"});
    EXPECT_EQ(report.at("prefix_hit_tokens"), hits) << "pages of " << page_size;
    EXPECT_DOUBLE_EQ(report.at("prefix_hit_rate"), static_cast<double>(hits) / 3730);
    EXPECT_EQ(report.at("prefill_tokens"), 3730 - hits);
  }
}

TEST_F(ReplayTools, SharingStaysWhenLengthsAreScaled) {
  const json report =
      replayed(kShared, {"--page-size", "8", "--max-running", "1", "--length-scale", "0.125"});
  // Prompts of 150, 128 + 0, 37 and 150 tokens; blocks of 64.
  EXPECT_EQ(report.at("prefix_hit_tokens"), 127 + 144);
  EXPECT_EQ(report.at("prefill_tokens"), 150 + 128 + 37 + 150 - 127 - 144);
  EXPECT_EQ(report.at("decode_tokens"), 0) << "every output is scaled to one token";
}

TEST_F(ReplayTools, EveryDtypeAndPageSizeIsWithinItsBounds) {
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    for (const char* page_size : {"1", "16", "64"}) {
      const json report = replayed(kShared, {"--dtype", dtype, "--page-size", page_size, "--check",
                                             "8", "--layers", "3", "--token-budget", "333"});
      EXPECT_EQ(report.at("requests_finished"), 4) << dtype << " " << page_size;
      EXPECT_EQ(report.at("checked_rows"), 8 * report.at("steps").get<int64_t>());
    }
  }
}

// 40 pages of 16 hold one request of 600 tokens at a time and a part of the next.
TEST_F(ReplayTools, NothingIsLostWhenPagesRunOut) {
  std::string trace;
  for (int i = 0; i < 8; ++i) {
    const std::string id = std::to_string(2 * i);
    trace += line(200 + 10 * i, 320, id);
  }
  const json report = replayed(trace, {"--pages", "40", "--page-size", "16", "--check", "4",
                                       "--length-scale", "1", "--token-budget", "64"});
  EXPECT_EQ(report.at("requests_finished"), 8);
  EXPECT_GT(report.at("preemptions"), 0);
  EXPECT_GT(report.at("recomputed_tokens"), 0);
  EXPECT_EQ(report.at("decode_tokens"), 8 * 319);
  EXPECT_LE(report.at("peak_pages"), 40);
}

// The second request is known to its end; its last page must be copied, and there is no page left.
TEST_F(ReplayTools, KnownPromptThatFillsThePoolIsServed) {
  const std::string trace = line(512, 1, "1") + line(512, 1, "1");
  const json report = replayed(trace, {"--pages", "8", "--page-size", "64"});
  EXPECT_EQ(report.at("requests_finished"), 2);
}

// Whatever is guessed, a request generates what the trace says and not a token more.
TEST_F(ReplayTools, SpeculationGivesTheSameTokensInFewerSteps) {
  const std::string trace =
      line(100, 60, "1") + line(700, 41, "2, 3") + line(90, 1, "4") + line(30, 2, "5");
  const int64_t decodes = 59 + 40 + 0 + 1;
  const auto served = [&](Arguments more) {
    more.insert(more.end(), {"--page-size", "4", "--check", "40"});
    json report = replayed(trace, more);
    EXPECT_EQ(report.at("requests_finished"), 4);
    EXPECT_EQ(report.at("prefill_tokens"), 100 + 700 + 90 + 30);
    EXPECT_EQ(report.at("decode_tokens"), decodes);
    return report;
  };
  const json plain = served({"--layers", "1"});
  EXPECT_EQ(plain.at("drafted_tokens"), 0);
  for (const char* layers : {"1", "2", "3"}) {
    const json report = served({"--layers", layers, "--speculate", "3"});
    const auto drafted = report.at("drafted_tokens").get<int64_t>();
    const auto accepted = report.at("accepted_tokens").get<int64_t>();
    EXPECT_EQ(report.at("layers"), std::stoi(layers));
    EXPECT_EQ(report.at("speculate"), 3);
    EXPECT_GT(accepted, 0);
    EXPECT_GT(report.at("rejected_tokens"), 0);
    EXPECT_EQ(drafted, accepted + report.at("rejected_tokens").get<int64_t>());
    EXPECT_EQ(drafted, 3 * (decodes - accepted)) << "each decode step: a token and three drafts";
    EXPECT_LT(report.at("steps"), plain.at("steps"));
  }
}

// Every row of every verify step against the reference: a row sees the drafts up to itself, a
// rejected one is gone for the next step. Pages of 1 and 4 make trims drop whole pages.
TEST_F(ReplayTools, EveryRowOfVerifyStepsIsRight) {
  const std::string trace = line(5, 40, "1") + line(9, 23, "2") + line(1, 31, "3");
  for (const char* page_size : {"1", "4", "64"}) {
    for (const char* drafts : {"1", "3", "7"}) {
      const json report = replayed(trace, {"--speculate", drafts, "--layers", "2", "--page-size",
                                           page_size, "--check", "1000000", "--dtype", "fp32"});
      const int64_t tokens = 5 + 9 + 1 + report.at("drafted_tokens").get<int64_t>() + 39 + 22 + 30 -
                             report.at("accepted_tokens").get<int64_t>();
      EXPECT_EQ(report.at("checked_rows"), tokens * 2 * 4) << "layers, heads: each row once";
    }
  }
}

TEST_F(ReplayTools, NothingIsLostWhenPagesRunOutWhileSpeculating) {
  std::string trace;
  for (int i = 0; i < 8; ++i) trace += line(200 + 10 * i, 320, std::to_string(2 * i));
  const json report =
      replayed(trace, {"--pages", "40", "--page-size", "16", "--check", "4", "--token-budget", "64",
                       "--speculate", "3", "--layers", "2"});
  EXPECT_EQ(report.at("requests_finished"), 8);
  EXPECT_GT(report.at("preemptions"), 0);
  EXPECT_EQ(report.at("decode_tokens"), 8 * 319);
  EXPECT_LE(report.at("peak_pages"), 40);
}

// 64 + 17 - 1 tokens are five pages of 16; the drafts of the last step need a sixth.
TEST_F(ReplayTools, PoolMustHoldTheDraftsOfTheLastStepToo) {
  const std::string trace = line(64, 17, "1");
  const Arguments five = {"--pages", "5", "--page-size", "16"};
  EXPECT_EQ(replayed(trace, five).at("decode_tokens"), 16);
  Arguments speculating = five;
  speculating.insert(speculating.end(), {"--speculate", "3"});
  const ToolResult refused = replay(trace, speculating);
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, HasSubstr("64 + 17 tokens and 3 drafts"));
  EXPECT_THAT(refused.err, HasSubstr("--pages 6"));
  speculating[1] = "6";
  EXPECT_EQ(replayed(trace, speculating).at("decode_tokens"), 16);
}

TEST_F(ReplayTools, SpeculationIsTheSameForASeed) {
  const auto served = [&](const char* seed) {
    return replayed(kShared, {"--speculate", "3", "--layers", "2", "--check", "8", "--seed", seed});
  };
  const json first = served("5");
  const json again = served("5");
  const json other = served("6");
  for (const char* key : {"steps", "drafted_tokens", "accepted_tokens", "output_digest"}) {
    EXPECT_EQ(first.at(key), again.at(key)) << key;
  }
  EXPECT_NE(first.at("output_digest"), other.at("output_digest"));
}

TEST_F(ReplayTools, DraftsAreInTheTableWhereThereAreAny) {
  EXPECT_THAT(replay(kShared, {"--speculate", "2"}).out, HasSubstr("accepted"));
  EXPECT_THAT(replay(kShared, {}).out, Not(HasSubstr("accepted")));
}

// 7 rows of tokens, 2 layers, 4 heads.
TEST_F(ReplayTools, NoRowIsCheckedTwice) {
  const std::string trace = line(5, 1, "1") + line(2, 1, "2");
  const json all = replayed(trace, {"--check", "56"});
  EXPECT_EQ(all.at("checked_rows"), 56);
  EXPECT_EQ(all.at("checked_requests"), 2);
  const json more = replayed(trace, {"--check", "1000000"});
  EXPECT_EQ(more.at("checked_rows"), 56);
  EXPECT_EQ(more.at("output_digest"), all.at("output_digest"));
  EXPECT_EQ(replayed(trace, {"--check", "55"}).at("checked_rows"), 55);
  EXPECT_EQ(replayed(trace, {"--check", "1"}).at("checked_requests"), 1) << "in its one step";
}

TEST_F(ReplayTools, SameSeedGivesTheSameOutputsAndAnotherSeedOthers) {
  const Arguments common = {"--threads", "2", "--check", "4", "--seed"};
  const auto digest_of = [&](const char* seed) {
    Arguments arguments = common;
    arguments.emplace_back(seed);
    return replayed(kShared, arguments).at("output_digest").get<std::string>();
  };
  const std::string first = digest_of("5");
  EXPECT_EQ(digest_of("5"), first);
  EXPECT_NE(digest_of("6"), first);
}

TEST_F(ReplayTools, EveryKernelOfTheMachineServes) {
  const auto doctor = json::parse(run_tool({"doctor", "--json"}).out);
  for (const auto& kernel : doctor.at("kernels")) {
    if (!kernel.at("runs")) continue;
    const std::string name = kernel.at("name");
    const json report = replayed(kShared, {"--kernel", name, "--length-scale", "0.25"});
    EXPECT_EQ(report.at("kernel"), name);
  }
}

TEST_F(ReplayTools, DeviceIsNamedInTheReport) {
  const json report = replayed(kShared, {"--device", "cpu", "--length-scale", "0.25"});
  EXPECT_EQ(report.at("device"), "cpu");
  EXPECT_NE(report.at("device_model"), "");
  EXPECT_THAT(replay(kShared, {"--length-scale", "0.25"}).out,
              HasSubstr(report.at("device_model").get<std::string>()));
}

TEST_F(ReplayTools, GpuServesWhereThereIsOneAndIsRefusedWithTheReasonElsewhere) {
  const auto cuda = json::parse(run_tool({"doctor", "--json"}).out).at("cuda");
  if (cuda.at("devices").empty()) {
    const ToolResult result = replay(kShared, {"--device", "cuda"});
    EXPECT_EQ(result.status, 2);
    EXPECT_THAT(result.err, HasSubstr(cuda.at("missing")));
    EXPECT_THAT(result.err, HasSubstr("cuda:0"));
    return;
  }
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    const json report = replayed(kShared, {"--device", "cuda", "--dtype", dtype, "--check", "8"});
    EXPECT_EQ(report.at("device"), "cuda:0");
    EXPECT_EQ(report.at("device_model"), cuda.at("devices").at(0).at("name"));
    EXPECT_EQ(report.at("requests_finished"), 4);
  }
}

TEST_F(ReplayTools, ArrivalTimesAreObeyedWhereAsked) {
  const std::string trace = line(20, 1, "1", 5000) + line(20, 1, "2", 5400);
  EXPECT_GE(replayed(trace, {"--arrivals"}).at("wall_ms"), 400);
  EXPECT_LT(replayed(trace).at("wall_ms"), 400);
}

TEST_F(ReplayTools, OnlyTheRequestsAskedForAreRead) {
  const json report = replayed(kShared + "broken\n", {"--requests", "4"});
  EXPECT_EQ(report.at("requests_finished"), 4);
}

TEST_F(ReplayTools, TableGoesToStandardOutputAndPlainProgressLinesToStandardError) {
  const ToolResult result = replay(kShared, {"--token-budget", "100"});
  EXPECT_EQ(result.status, 0) << result.err;
  for (const char* row : {"requests finished      4 of 4", "prefix hit rate", "peak pages",
                          "pages leaked           0", "p99", "GFLOP/s", "largest error"}) {
    EXPECT_THAT(result.out, HasSubstr(row));
  }
  EXPECT_THAT(result.err, HasSubstr("100 % of"));
  EXPECT_THAT(result.err, Not(HasSubstr("\r"))) << "no bar where there is no terminal";
  EXPECT_THAT(replay(kShared, {"--quiet"}).err, IsEmpty());
}

TEST_F(ReplayTools, ProgressBarIsDrawnOnATerminal) {
  const std::string trace = folder_.write("trace.jsonl", kShared);
  Arguments arguments = {"replay", trace, "--token-budget", "100"};
  arguments.insert(arguments.end(), kSmall.begin(), kSmall.end());
  const ToolResult result = run_tool_on_terminal(arguments);
  EXPECT_EQ(result.status, 0) << result.out;
  EXPECT_THAT(result.out, HasSubstr("\r[#"));
  EXPECT_THAT(result.out, HasSubstr("\r\x1b[Krequests finished")) << "the table takes its place";
}

TEST_F(ReplayTools, InterruptEndsTheStepAndWritesNoResult) {
  std::string many;
  for (int i = 0; i < 400; ++i) many += line(400, 300, std::to_string(i));
  const ToolResult result = interrupt_tool(
      {"replay", folder_.write("trace.jsonl", many), "--json", folder_.path("out.json")}, "10 %",
      SIGINT);
  EXPECT_EQ(result.status, 130) << result.err;
  EXPECT_THAT(result.out, HasSubstr("of 400"));
  EXPECT_THAT(result.out, HasSubstr("pages leaked           0"));
  EXPECT_THAT(result.err, HasSubstr("interrupted"));
  EXPECT_THAT(folder_.names(), ElementsAre("trace.jsonl"));
}

// The second step has more rows to check than the test waits for.
TEST_F(ReplayTools, InterruptEndsBetweenCheckedRows) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const std::string trace = line(300, 1, "1") + line(2000, 1, "2, 3, 4, 5");
    Arguments arguments = {"replay",        folder_.write("trace.jsonl", trace),
                           "--layers",      "8",
                           "--check",       "1000000",
                           "--max-running", "1"};
    arguments.insert(arguments.end(), kSmall.begin(), kSmall.end());
    const ToolResult result = interrupt_tool(arguments, "13 %", signal);
    EXPECT_EQ(result.status, 130) << result.err;
    EXPECT_THAT(result.out, HasSubstr("requests finished      2 of 2"));
    const std::string name = "checked rows";
    const int64_t checked = std::stoll(result.out.substr(result.out.rfind(name) + name.size()));
    EXPECT_GE(checked, 300 * 8 * 4);
    EXPECT_LT(checked, 2300 * 8 * 4);
  }
}

TEST_F(ReplayTools, JsonGoesThroughALinkAndDoesNotReplaceAPipe) {
  const std::string target = folder_.write("target.json", "old");
  std::filesystem::create_symlink(target, folder_.path("link.json"));
  ASSERT_EQ(replay(kShared, {"--json", folder_.path("link.json")}).status, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(folder_.path("link.json")));
  EXPECT_THAT(read_file(target), HasSubstr("requests_finished"));
  const std::string pipe = folder_.path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  EXPECT_EQ(replay(kShared, {"--json", pipe}).status, 0);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  char text[4096];
  EXPECT_GT(read(reader, text, sizeof text), 0);
  close(reader);
}

TEST_F(ReplayTools, JsonFileHoldsTheResultAndNothingElseIsLeft) {
  const ToolResult result = replay(kShared, {"--json", folder_.path("out.json")});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("requests finished"));
  EXPECT_THAT(folder_.names(), ElementsAre("out.json", "trace.jsonl"));
  const json report = json::parse(read_file(folder_.path("out.json")));
  for (const char* key : {"requests_finished", "requests_failed", "prefill_tokens", "decode_tokens",
                          "prefix_hit_rate", "peak_pages", "pages_leaked", "attention_ms",
                          "max_abs_error", "checked_rows"}) {
    EXPECT_TRUE(report.contains(key)) << key;
  }
}

TEST_F(ReplayTools, RatesAreGivenAgainstTheMachinesLimits) {
  const std::string trace = folder_.write("trace.jsonl", line(600, 3, "1, 2"));
  const ToolResult result = run_tool({"replay", trace, "--json"});
  ASSERT_EQ(result.status, 0) << result.err;
  const json report = json::parse(result.out);
  EXPECT_GT(report.at("attention_gflops"), 0);
  EXPECT_LT(report.at("attention_gflops"), report.at("machine_gflops"));
  EXPECT_GT(report.at("machine_gbytes_per_s"), 0);
}

TEST_F(ReplayTools, BrokenTraceIsRefusedByLineAndNothingIsWritten) {
  const ToolResult result =
      replay(kShared + "\n" + line(0, 1, "1"), {"--json", folder_.path("out.json")});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.out, IsEmpty());
  EXPECT_THAT(result.err, HasSubstr("trace.jsonl:6: input_length"));
  EXPECT_THAT(folder_.names(), ElementsAre("trace.jsonl"));
}

TEST_F(ReplayTools, OlderResultStaysWhereTheNewRunIsRefused) {
  folder_.write("out.json", "older");
  EXPECT_EQ(replay("broken", {"--json", folder_.path("out.json")}).status, 2);
  EXPECT_EQ(read_file(folder_.path("out.json")), "older");
}

TEST_F(ReplayTools, MissingTraceIsRefusedByName) {
  const ToolResult result = run_tool({"replay", folder_.path("none.jsonl")});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("none.jsonl"));
}

TEST_F(ReplayTools, PoolTooSmallForOneRequestIsRefusedWithWhatItNeeds) {
  const ToolResult result = replay(kShared, {"--pages", "75", "--page-size", "16"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.out, IsEmpty());
  EXPECT_THAT(result.err, HasSubstr("request 1 of the trace needs 76 pages of 16"));
  EXPECT_THAT(result.err, HasSubstr("--pages 76"));
}

// The public trace is no part of the repository; where a copy lies beside it, it is served too.
TEST_F(ReplayTools, PublicTraceIsServedWhereItIsAtHand) {
  const std::string trace =
      std::string(MLA_SOURCE_DIR) + "/../shared/traces/mooncake_conversation_1500.jsonl";
  if (!std::filesystem::exists(trace)) GTEST_SKIP() << "no file " << trace;
  const ToolResult result =
      run_tool({"replay", trace, "--requests", "60", "--length-scale", "0.015625", "--layers", "1",
                "--page-size", "8", "--pages", "700", "--no-limits", "--json"});
  ASSERT_EQ(result.status, 0) << result.err;
  const json report = json::parse(result.out);
  EXPECT_EQ(report.at("requests_finished"), 60);
  EXPECT_GT(report.at("prefix_hit_tokens"), 0);
  EXPECT_LE(report.at("peak_pages"), 700);
}

TEST_F(ReplayTools, MoreMemoryThanThereIsIsRefusedWithWhatIsNeeded) {
  const std::string trace = folder_.write("trace.jsonl", line(20, 1, "1"));
  for (const Arguments& huge : {Arguments{"--pages", "2000000000"},
                                Arguments{"--token-budget", "1048576", "--heads", "1024"}}) {
    Arguments arguments = {"replay", trace};
    arguments.insert(arguments.end(), huge.begin(), huge.end());
    const ToolResult result = run_tool(arguments);
    EXPECT_EQ(result.status, 2);
    EXPECT_THAT(result.err, HasSubstr("MiB of memory are available"));
  }
}

TEST_F(ReplayTools, WrongArgumentsAreRefused) {
  const std::vector<Arguments> wrong = {
      {"--requests", "0"},       {"--requests", "x"},
      {"--length-scale", "0"},   {"--length-scale", "-1"},
      {"--length-scale", "nan"}, {"--heads", "0"},
      {"--heads", "1025"},       {"--layers", "0"},
      {"--page-size", "0"},      {"--pages", "0"},
      {"--pages", "-3"},         {"--token-budget", "0"},
      {"--dtype", "int8"},       {"--threads", "0"},
      {"--check", "-1"},         {"--seed", "-1"},
      {"--kernel", "nonsense"},  {"--kv-lora-rank", "9000"},
      {"--sm-scale", "0"},       {"--speculate", "-1"},
      {"--speculate", "1025"},   {"--seed", "18446744073709551616"},
      {"--pages", "2000000000"}, {"--nonsense"}};
  for (const Arguments& arguments : wrong) {
    const ToolResult result = replay(line(20, 1, "1"), arguments);
    EXPECT_EQ(result.status, 2) << testing::PrintToString(arguments) << result.err;
    EXPECT_THAT(result.out, IsEmpty());
    EXPECT_FALSE(result.err.empty());
  }
}

}  // namespace
}  // namespace mla::test
