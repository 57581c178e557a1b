#include "device/test_device.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

#include "device/runtime.hpp"
#include "mla/error.hpp"

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
  const char* variable = std::getenv("MLA_TEST_DEVICE");
  const std::string_view name = variable == nullptr ? "cpu" : variable;
  if (name != "cpu" && name != "cuda") {
    throw_invalid({.what = "MLA_TEST_DEVICE",
                   .where = "test_device",
                   .expected = "cpu or cuda",
                   .got = std::string(name)});
  }
  return name == "cuda" ? kCuda : Device{};
}

std::string missing(Device device) {
  std::string instead;
  if (device::find_runtime(device, instead) != nullptr) return "";
  return to_string(device) + " is not there; there is " + instead;
}

namespace {

template <class T>
std::vector<T> read_values(const TensorView<const T, 1>& tensor, Stream stream) {
  std::vector<T> values(static_cast<size_t>(tensor.shape[0]));
  device::Runtime& runtime = device::runtime_of(tensor.device);
  runtime.copy_to_host(values.data(), tensor.data, values.size() * sizeof(T), stream);
  runtime.synchronize(stream);
  return values;
}

}  // namespace

std::vector<int32_t> read_back(const TensorView<const int32_t, 1>& tensor, Stream stream) {
  return read_values(tensor, stream);
}
std::vector<int64_t> read_back(const TensorView<const int64_t, 1>& tensor, Stream stream) {
  return read_values(tensor, stream);
}

}  // namespace mla::test
