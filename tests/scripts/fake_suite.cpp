#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

// A program of scripts/gpu_check.sh as that test wants it: FAKE_SUITE says how it goes.
namespace {

bool goes(std::string_view how) {
  const char* said = std::getenv("FAKE_SUITE");
  return said != nullptr && said == how;
}

class NeedsADevice : public testing::Environment {
  void SetUp() override {
    if (goes("without_device")) GTEST_SKIP() << "[  SKIPPED ] cuda:0 is not there";
  }
};
const testing::Environment* const kNeedsADevice =
    testing::AddGlobalTestEnvironment(new NeedsADevice);

TEST(Fake, Runs) {
  if (goes("skipping_all")) GTEST_SKIP();
}
TEST(Fake, MayFail) {
  if (goes("skipping_all") || goes("skipping")) GTEST_SKIP();
  EXPECT_FALSE(goes("failing"));
}
TEST(Fake, MayEndTheProgram) {
  if (goes("skipping_all")) GTEST_SKIP();
  if (goes("ending")) std::abort();
}

}  // namespace
