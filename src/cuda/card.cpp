#include "cuda/card.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>

#include "cuda/error.hpp"
#include "device/runtime.hpp"

namespace mla::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Of the driver that is loaded; the CUDA runtime does not know it.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  return driver_version_in(line);
}

}  // namespace

std::string driver_version_in(const std::string& line) {
  std::istringstream words(line);
  const auto is_version = [](const std::string& word) {
    const auto dot = word.find('.');
    return dot != 0 && dot != std::string::npos &&
           word.find_first_not_of("0123456789.") == std::string::npos;
  };
  const auto found = std::find_if(std::istream_iterator<std::string>(words), {}, is_version);
  return found == std::istream_iterator<std::string>{} ? "" : *found;
}

Card describe_card(int32_t index) {
  device::runtime_of({DeviceKind::kCuda, index}, "device", "describe_card");
  cudaDeviceProp properties{};
  int driver = 0;
  int runtime = 0;
  MLA_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  MLA_CUDA_CHECK(cudaDriverGetVersion(&driver));
  MLA_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  return {.name = properties.name,
          .driver_version = driver_version(),
          .driver_cuda_version = version_text(driver),
          .runtime_version = version_text(runtime),
          .compute_capability = properties.major * 10 + properties.minor,
          .num_sms = properties.multiProcessorCount,
          .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem),
          .l2_bytes = properties.l2CacheSize};
}

std::vector<Card> describe_cards(std::string& missing) {
  std::vector<Card> cards;
  const int32_t count = count_cards(missing);
  cards.reserve(static_cast<size_t>(count));
  for (int32_t index = 0; index < count; ++index) cards.push_back(describe_card(index));
  return cards;
}

int32_t count_cards(std::string& missing) {
  int driver = 0;
  MLA_CUDA_CHECK(cudaDriverGetVersion(&driver));
  int count = 0;
  const cudaError_t answer = driver == 0 ? cudaSuccess : cudaGetDeviceCount(&count);
  if (answer != cudaSuccess) {
    cudaGetLastError();
    count = 0;
    missing = cudaGetErrorString(answer);
  } else if (count == 0) {
    missing = driver == 0 ? "no CUDA driver is installed" : "none is visible";
  }
  return count;
}

}  // namespace mla::cuda
