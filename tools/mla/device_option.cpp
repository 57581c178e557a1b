#include "mla/device_option.hpp"

#include <charconv>
#include <optional>

#include "device/runtime.hpp"

namespace mla::cli {
namespace {

std::optional<Device> read_device(const std::string& text) {
  if (text == "cpu") return Device{};
  if (text == "cuda") return Device{DeviceKind::kCuda, 0};
  constexpr std::string_view kPrefix = "cuda:";
  if (!text.starts_with(kPrefix)) return std::nullopt;
  Device device{DeviceKind::kCuda, 0};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + kPrefix.size(), end, device.index);
  if (error != std::errc{} || stop != end || device.index < 0) return std::nullopt;
  return device;
}

}  // namespace

CLI::Validator device_option() {
  return CLI::Validator(
      [](std::string& text) {
        return read_device(text) ? std::string() : "expected cpu, cuda or cuda:N, got " + text;
      },
      "DEVICE");
}

Device parse_device(const std::string& text) { return read_device(text).value_or(Device{}); }

Device find_device(const std::string& text, const char* command) {
  const Device device = parse_device(text);
  device::runtime_of(device, "--device", command);  // throws
  return device;
}

}  // namespace mla::cli
