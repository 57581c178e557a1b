#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "cases/random.hpp"
#include "layer/gemm.hpp"

namespace mla::layer {
namespace {

struct Shape {
  int64_t m, batch, n, k;
};

// Uniform values in [-1, 1), rounded to the dtype, with a gap of NaN after each row.
struct Operand {
  static constexpr int64_t kGap = 3;

  Operand(DType type, std::array<int64_t, 3> extents, uint64_t seed)
      : dtype(type), shape(extents), row(extents[2] + kGap) {
    bytes.assign(static_cast<size_t>(shape[0] * shape[1] * row * size_of(dtype)), std::byte{0xff});
    for (int64_t i = 0; seed != 0 && i < shape[0] * shape[1]; ++i) {
      cases::fill_uniform(cases::row_key(seed, 0, static_cast<uint64_t>(i)), dtype,
                          bytes.data() + i * row * size_of(dtype), shape[2]);
    }
  }

  Tensor<3> view() { return {bytes.data(), shape, {shape[1] * row, row, 1}, {}, dtype}; }
  // The same numbers as the transpose of the last two dimensions.
  Tensor<3> turned_view() {
    return {bytes.data(), {shape[0], shape[2], shape[1]}, {shape[1] * row, 1, row}, {}, dtype};
  }
  float at(int64_t i, int64_t j, int64_t c) const {
    const auto read = [&](auto value) {
      const int64_t index = (i * shape[1] + j) * row + c;
      std::memcpy(&value, bytes.data() + index * int64_t{sizeof(value)}, sizeof(value));
      return static_cast<float>(value);
    };
    return dtype == DType::kFloat32 ? read(float{}) : read(BFloat16{});
  }

  DType dtype;
  std::array<int64_t, 3> shape;
  int64_t row;
  std::vector<std::byte> bytes;
};

// fp32 sums of k products of values below 1: k / 2^24 at worst; bf16 results add half a unit.
void expect_product(const Shape& s, DType in, DType out, bool turned, Executor& executor,
                    Bf16Math math) {
  Operand x(in, {s.m, s.batch, s.k}, 1);
  Operand w(in, turned ? std::array{s.batch, s.k, s.n} : std::array{s.batch, s.n, s.k}, 2);
  Operand y(out, {s.m, s.batch, s.n}, 0);
  gemm(x.view(), turned ? w.turned_view() : w.view(), y.view(), executor, math);
  for (int64_t m = 0; m < s.m; ++m) {
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t n = 0; n < s.n; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < s.k; ++k) {
          sum += double{x.at(m, b, k)} * (turned ? w.at(b, k, n) : w.at(b, n, k));
        }
        const double rounding = out == DType::kBFloat16 ? std::abs(sum) * 0x1p-8 : 0;
        const double slack =
            static_cast<double>(s.k) * std::sqrt(static_cast<double>(s.k)) * 0x1p-24;
        ASSERT_NEAR(y.at(m, b, n), sum, rounding + slack) << m << " " << b << " " << n;
      }
      for (int64_t gap = s.n; gap < s.n + Operand::kGap; ++gap) {
        ASSERT_TRUE(std::isnan(y.at(m, b, gap))) << "written behind the row";
      }
    }
  }
}

constexpr Shape kShapes[] = {{1, 1, 1, 1},     {1, 1, 200, 70}, {5, 1, 1, 33},    {3, 1, 65, 1},
                             {17, 1, 130, 96}, {1, 4, 64, 32},  {140, 3, 20, 48}, {2, 5, 1, 16}};

class GemmUnit : public testing::TestWithParam<int> {
 protected:
  Executor executor_{GetParam()};
};

TEST_P(GemmUnit, Fp32IsTheProductForEveryShape) {
  for (const Shape& s : kShapes) {
    for (const bool turned : {false, true}) {
      SCOPED_TRACE(testing::Message() << s.m << " " << s.batch << " " << s.n << " " << s.k);
      expect_product(s, DType::kFloat32, DType::kFloat32, turned, executor_, Bf16Math::kNative);
    }
  }
}

TEST_P(GemmUnit, Bf16IsTheProductInBothWaysAndBothOutputs) {
  for (const Shape& s : kShapes) {
    for (const bool turned : {false, true}) {
      SCOPED_TRACE(testing::Message() << s.m << " " << s.batch << " " << s.n << " " << s.k);
      for (const DType out : {DType::kFloat32, DType::kBFloat16}) {
        for (const Bf16Math math : {Bf16Math::kNative, Bf16Math::kWidened}) {
          expect_product(s, DType::kBFloat16, out, turned, executor_, math);
        }
      }
    }
  }
}

TEST_P(GemmUnit, LargeProductIsCutAmongTheThreads) {
  expect_product({9, 1, 1000, 128}, DType::kFloat32, DType::kFloat32, false, executor_,
                 Bf16Math::kNative);
  expect_product({150, 6, 64, 40}, DType::kBFloat16, DType::kBFloat16, true, executor_,
                 Bf16Math::kNative);
}

TEST_P(GemmUnit, NothingToDoTouchesNothing) {
  gemm({nullptr, {0, 1, 4}, {4, 4, 1}, {}, DType::kFloat32},
       {nullptr, {1, 4, 4}, {16, 4, 1}, {}, DType::kFloat32},
       {nullptr, {0, 1, 4}, {4, 4, 1}, {}, DType::kFloat32}, executor_);
}

INSTANTIATE_TEST_SUITE_P(Threads, GemmUnit, testing::Values(1, 2, 5));

}  // namespace
}  // namespace mla::layer
