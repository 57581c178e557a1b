#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "cases/random.hpp"
#include "mla/device_memory.hpp"
#include "mla/tensor_view.hpp"

// Matrix products of small shapes against sums in double, for every implementation of gemm.
namespace mla::layer {

struct Shape {
  int64_t m, batch, n, k;
};

constexpr Shape kShapes[] = {{1, 1, 1, 1},     {1, 1, 200, 70}, {5, 1, 1, 33},    {3, 1, 65, 1},
                             {17, 1, 130, 96}, {1, 4, 64, 32},  {140, 3, 20, 48}, {2, 5, 1, 16}};

// Uniform values in [-1, 1), rounded to the dtype, with a gap of NaN after each row; NaN alone
// without a seed.
class Operand {
 public:
  static constexpr int64_t kGap = 3;

  Operand(Device device, DType dtype, std::array<int64_t, 3> shape, uint64_t seed)
      : dtype_(dtype),
        shape_(shape),
        row_(shape[2] + kGap),
        bytes_(static_cast<size_t>(shape[0] * shape[1] * row_ * size_of(dtype)), std::byte{0xff}),
        memory_(device, bytes_.size()) {
    for (int64_t i = 0; seed != 0 && i < shape[0] * shape[1]; ++i) {
      cases::fill_uniform(cases::row_key(seed, 0, static_cast<uint64_t>(i)), dtype,
                          bytes_.data() + i * row_ * size_of(dtype), shape[2]);
    }
    memory_.copy_from_host(bytes_.data(), bytes_.size());
    synchronize(device);
  }

  Tensor<3> view() const {
    return {memory_.data(), shape_, {shape_[1] * row_, row_, 1}, memory_.device(), dtype_};
  }
  // The same numbers as the transpose of the last two dimensions.
  Tensor<3> turned_view() const {
    return {memory_.data(),
            {shape_[0], shape_[2], shape_[1]},
            {shape_[1] * row_, 1, row_},
            memory_.device(),
            dtype_};
  }
  // What the device has now.
  void fetch() {
    synchronize(memory_.device());
    memory_.copy_to_host(bytes_.data(), bytes_.size());
    synchronize(memory_.device());
  }
  float at(int64_t i, int64_t j, int64_t c) const {
    const auto read = [&](auto value) {
      const int64_t index = (i * shape_[1] + j) * row_ + c;
      std::memcpy(&value, bytes_.data() + index * int64_t{sizeof(value)}, sizeof(value));
      return static_cast<float>(value);
    };
    if (dtype_ == DType::kFloat32) return read(float{});
    return dtype_ == DType::kBFloat16 ? read(BFloat16{}) : read(Float16{});
  }

 private:
  DType dtype_;
  std::array<int64_t, 3> shape_;
  int64_t row_;
  std::vector<std::byte> bytes_;
  DeviceMemory memory_;
};

// fp32 sums of k products of values below 1: k / 2^24 at worst; 16-bit results add half a unit.
// multiply(x, w, y) is done, or queued on the default stream.
template <class Multiply>
void expect_product(const Shape& s, DType in, DType out, bool turned, Device device,
                    const Multiply& multiply) {
  const Operand x(device, in, {s.m, s.batch, s.k}, 1);
  const Operand w(device, in,
                  turned ? std::array{s.batch, s.k, s.n} : std::array{s.batch, s.n, s.k}, 2);
  Operand y(device, out, {s.m, s.batch, s.n}, 0);
  multiply(x.view(), turned ? w.turned_view() : w.view(), y.view());
  y.fetch();
  const double unit = out == DType::kFloat32 ? 0 : out == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  const double slack = static_cast<double>(s.k) * std::sqrt(static_cast<double>(s.k)) * 0x1p-24;
  for (int64_t m = 0; m < s.m; ++m) {
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t n = 0; n < s.n; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < s.k; ++k) {
          sum += double{x.at(m, b, k)} * (turned ? w.at(b, k, n) : w.at(b, n, k));
        }
        ASSERT_NEAR(y.at(m, b, n), sum, std::abs(sum) * unit + slack) << m << " " << b << " " << n;
      }
      for (int64_t gap = s.n; gap < s.n + Operand::kGap; ++gap) {
        ASSERT_TRUE(std::isnan(y.at(m, b, gap))) << "written behind the row";
      }
    }
  }
}

}  // namespace mla::layer
