#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "device/host_runtime.hpp"
#include "device/owned_event.hpp"
#include "mla/error.hpp"

namespace mla::device {
namespace {

TEST(OwnedEventUnit, IsGivenBackOnceWhoeverOwnsItLast) {
  test::HostRuntime runtime;
  {
    OwnedEvent first(runtime);
    const OwnedEvent moved(std::move(first));
    OwnedEvent assigned;
    EXPECT_FALSE(assigned);
    assigned = OwnedEvent(runtime);
    EXPECT_TRUE(moved && assigned);
    EXPECT_EQ(runtime.num_held, 2);
    assigned = OwnedEvent(runtime);
    EXPECT_EQ(runtime.num_held, 2) << "the one before is given back";
  }
  EXPECT_EQ(runtime.num_held, 0);
}

// As a graph runner makes one for each of its slots.
TEST(OwnedEventUnit, ThoseBeforeOneThatIsNotToBeHadAreGivenBack) {
  test::HostRuntime runtime;
  runtime.num_left = 2;
  const auto make_three = [&runtime] {
    std::vector<OwnedEvent> events;
    for (int i = 0; i < 3; ++i) events.emplace_back(runtime);
  };
  EXPECT_THROW(make_three(), CudaError);
  EXPECT_EQ(runtime.num_left, 0);
  EXPECT_EQ(runtime.num_held, 0);
}

}  // namespace
}  // namespace mla::device
