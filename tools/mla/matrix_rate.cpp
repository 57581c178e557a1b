#include <algorithm>
#include <array>
#include <vector>

#include "cases/random.hpp"
#include "layer/operations.hpp"
#include "mla/ceilings.hpp"
#include "mla/clock.hpp"
#include "mla/device_memory.hpp"
#include "mla/error.hpp"

namespace mla::cli {
namespace {

constexpr int64_t kSide = 8192;
constexpr int kRounds = 5;
constexpr int kProducts = 10;  // of a round, about 15 ms at 700 TFLOP/s

// Null where the machine has no cuBLAS.
std::unique_ptr<layer::Operations> find_operations(Device device) {
  try {
    return layer::make_operations({.device = device});
  } catch (const InvalidArgument&) {
    return nullptr;
  }
}

DeviceMemory random_matrix(Device device, uint64_t seed) {
  DeviceMemory memory(device, kSide * kSide * sizeof(BFloat16));
  std::vector<BFloat16> values(kSide * kSide);
  cases::fill_uniform(cases::row_key(seed, 0, 0), DType::kBFloat16, values.data(), kSide * kSide);
  memory.copy_from_host(values.data(), memory.bytes());
  synchronize(device);
  return memory;
}

}  // namespace

std::optional<double> measure_matrix_tflops(Device device) {
  const auto operations = find_operations(device);
  if (operations == nullptr) return std::nullopt;
  const DeviceStream stream(device);
  const DeviceMemory x = random_matrix(device, 1);
  const DeviceMemory w = random_matrix(device, 2);
  const DeviceMemory y(device, x.bytes());
  const auto matrix = [&](void* data, std::array<int64_t, 3> shape) {
    return contiguous_view(data, shape, DType::kBFloat16, device);
  };
  const auto multiply = [&](int count) {
    const double begin = now_s();
    for (int i = 0; i < count; ++i) {
      operations->gemm(matrix(x.data(), {kSide, 1, kSide}), matrix(w.data(), {1, kSide, kSide}),
                       matrix(y.data(), {kSide, 1, kSide}), stream);
    }
    stream.synchronize();
    return (now_s() - begin) / count;
  };
  multiply(2);
  double best_s = multiply(kProducts);
  for (int round = 1; round < kRounds; ++round) best_s = std::min(best_s, multiply(kProducts));
  return 2.0 * kSide * kSide * kSide / best_s * 1e-12;
}

}  // namespace mla::cli
