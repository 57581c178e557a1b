#include <cstring>
#include <vector>

#include "cases/random.hpp"
#include "cuda/cuda_test.hpp"
#include "mla/device_memory.hpp"

namespace mla::cuda {
namespace {

class CudaRandom : public CudaTest {};

// What is drawn on the device can be drawn again on the host, bit for bit.
TEST_F(CudaRandom, RowsHaveTheBitsOfTheHosts) {
  constexpr int64_t kRows = 300;
  std::vector<uint64_t> keys(kRows);
  for (size_t row = 0; row < keys.size(); ++row) keys[row] = cases::row_key(3, row, row * row);
  DeviceMemory device_keys(kCuda, keys.size() * sizeof(uint64_t));
  device_keys.copy_from_host(keys.data(), device_keys.bytes());
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const int64_t columns : {1, 33, 576, 16 * 576}) {
      const auto row_bytes = static_cast<size_t>(columns * size_of(dtype));
      DeviceMemory out(kCuda, kRows * row_bytes);
      cases::fill_uniform_rows(static_cast<const uint64_t*>(device_keys.data()), kRows, dtype,
                               out.data(), columns, kCuda, {});
      std::vector<std::byte> got(out.bytes());
      out.copy_to_host(got.data(), out.bytes());
      synchronize(kCuda);
      std::vector<std::byte> expected(out.bytes());
      for (size_t row = 0; row < keys.size(); ++row) {
        cases::fill_uniform(keys[row], dtype, expected.data() + row * row_bytes, columns);
      }
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size()), 0)
          << name_of(dtype) << ", " << columns << " columns";
    }
  }
}

}  // namespace
}  // namespace mla::cuda
