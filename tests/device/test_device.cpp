#include "device/test_device.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

#include "device/runtime.hpp"

namespace mla::test {
namespace {

// What skips in a global set-up skips all tests. GoogleTest prints the bare message then, and ctest
// looks for the mark.
class NeedsTheDevice : public testing::Environment {
  void SetUp() override {
    const std::string reason = missing(test_device());
    if (!reason.empty()) GTEST_SKIP() << "[  SKIPPED ] " << reason;
  }
};
const testing::Environment* const kNeedsTheDevice =
    testing::AddGlobalTestEnvironment(new NeedsTheDevice);

}  // namespace

Device test_device() {
  const char* name = std::getenv("MLA_TEST_DEVICE");
  const bool cuda = name != nullptr && std::string_view(name) == "cuda";
  return cuda ? kCuda : Device{};
}

std::string missing(Device device) {
  std::string instead;
  if (device::find_runtime(device, instead) != nullptr) return "";
  return to_string(device) + " is not there; there is " + instead;
}

std::vector<int32_t> read_back(const TensorView<const int32_t, 1>& tensor, Stream stream) {
  std::vector<int32_t> values(static_cast<size_t>(tensor.shape[0]));
  device::Runtime& runtime = device::runtime_of(tensor.device);
  runtime.copy_to_host(values.data(), tensor.data, values.size() * sizeof(int32_t), stream);
  runtime.synchronize(stream);
  return values;
}

}  // namespace mla::test
