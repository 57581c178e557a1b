// Runs the example engine as a user would.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "device/test_device.hpp"

namespace mla {
namespace {

struct EngineRun {
  int status = -1;  // exit status; -1 where a signal ended it
  std::string out;  // standard output and standard error
  std::map<std::string, uint64_t> counts;
};

// "name: number" on each line; other lines count nothing.
std::map<std::string, uint64_t> counts_of(const std::string& out) {
  std::map<std::string, uint64_t> counts;
  std::istringstream lines(out);
  for (std::string name; std::getline(lines, name, ':');) {
    lines >> counts[name];
    lines.ignore();
  }
  return counts;
}

EngineRun run_engine(const std::string& arguments) {
  EngineRun run;
  const char* device = test::test_device() == Device{} ? " " : " cuda ";
  std::FILE* pipe = popen((MLA_ENGINE_PATH + (device + arguments) + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return run;
  char buffer[256];
  while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) run.out += buffer;
  const int state = pclose(pipe);
  if (WIFEXITED(state)) run.status = WEXITSTATUS(state);
  run.counts = counts_of(run.out);
  return run;
}

// engine.txt is what the engine prints when run without arguments.
TEST(EngineExample, DefaultRunPrintsWhatItAlwaysPrints) {
  std::ostringstream expected;
  expected << std::ifstream(MLA_ENGINE_EXPECTED).rdbuf();
  const EngineRun run = run_engine("");
  EXPECT_EQ(run.status, 0);
  EXPECT_EQ(run.out, expected.str());
}

// Drafts, pages and seed: whatever was drafted, put back or planned in vain, every request gets the
// tokens that it gets from the main model alone with all the pages it wants.
TEST(EngineExample, SpeculationAndPressureChangeNoToken) {
  for (const std::string seed : {"2", "7"}) {
    const EngineRun alone = run_engine("0 400 " + seed);
    ASSERT_EQ(alone.status, 0) << alone.out;
    for (const char* drafts_and_pages : {"3 400 ", "1 60 ", "6 40 "}) {
      SCOPED_TRACE(drafts_and_pages + seed);
      EngineRun run = run_engine(drafts_and_pages + seed);
      ASSERT_EQ(run.status, 0) << run.out;
      for (const char* same : {"digest of the texts", "tokens generated", "requests finished"}) {
        EXPECT_EQ(run.counts.at(same), alone.counts.at(same)) << same;
      }
      EXPECT_EQ(run.counts.at("requests finished"), 16);
    }
  }
}

TEST(EngineExample, PlentyOfPagesMakesNobodyWait) {
  EngineRun run = run_engine("3 400 2");
  EXPECT_EQ(run.status, 0) << run.out;
  EXPECT_EQ(run.counts["times not started"], 0);
  EXPECT_EQ(run.counts["times put back"], 0);
}

TEST(EngineExample, SmallPoolMakesRequestsWaitDraftsMissAndPlansGoStale) {
  EngineRun run = run_engine("3 40 7");
  EXPECT_EQ(run.status, 0) << run.out;
  for (const char* name : {"times not started", "times put back", "drafts accepted",
                           "drafts rejected", "plans promoted", "plans stale"}) {
    EXPECT_GT(run.counts[name], 5) << name;
  }
  EXPECT_EQ(run.counts["pages lost"], 0);
}

// A verify step is always known early, so at least every second step is, while nobody has to wait.
TEST(EngineExample, EveryVerifyStepIsPlannedEarly) {
  EngineRun run = run_engine("3 400 2");
  EXPECT_GE(2 * run.counts["plans promoted"], run.counts["steps"]) << run.out;
}

TEST(EngineExample, RequestLargerThanThePoolIsRefused) {
  const EngineRun run = run_engine("3 12");
  EXPECT_EQ(run.status, 1);
  EXPECT_EQ(run.out, "engine: too few pages for one request\n");
}

}  // namespace
}  // namespace mla
