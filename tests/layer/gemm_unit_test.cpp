#include <gtest/gtest.h>

#include "layer/gemm.hpp"
#include "layer/product.hpp"

namespace mla::layer {
namespace {

class GemmUnit : public testing::TestWithParam<int> {
 protected:
  void expect(const Shape& s, DType in, DType out, bool turned, Bf16Math math) {
    SCOPED_TRACE(testing::Message() << s.m << " " << s.batch << " " << s.n << " " << s.k);
    expect_product(s, in, out, turned, Device{}, [&](const auto& x, const auto& w, const auto& y) {
      gemm(x, w, y, executor_, math);
    });
  }

  Executor executor_{GetParam()};
};

TEST_P(GemmUnit, Fp32IsTheProductForEveryShape) {
  for (const Shape& s : kShapes) {
    for (const bool turned : {false, true}) {
      expect(s, DType::kFloat32, DType::kFloat32, turned, Bf16Math::kNative);
    }
  }
}

TEST_P(GemmUnit, Bf16IsTheProductInBothWaysAndBothOutputs) {
  for (const Shape& s : kShapes) {
    for (const bool turned : {false, true}) {
      for (const DType out : {DType::kFloat32, DType::kBFloat16}) {
        for (const Bf16Math math : {Bf16Math::kNative, Bf16Math::kWidened}) {
          expect(s, DType::kBFloat16, out, turned, math);
        }
      }
    }
  }
}

TEST_P(GemmUnit, LargeProductIsCutAmongTheThreads) {
  expect({9, 1, 1000, 128}, DType::kFloat32, DType::kFloat32, false, Bf16Math::kNative);
  expect({150, 6, 64, 40}, DType::kBFloat16, DType::kBFloat16, true, Bf16Math::kNative);
}

TEST_P(GemmUnit, NothingToDoTouchesNothing) {
  gemm({nullptr, {0, 1, 4}, {4, 4, 1}, {}, DType::kFloat32},
       {nullptr, {1, 4, 4}, {16, 4, 1}, {}, DType::kFloat32},
       {nullptr, {0, 1, 4}, {4, 4, 1}, {}, DType::kFloat32}, executor_);
}

INSTANTIATE_TEST_SUITE_P(Threads, GemmUnit, testing::Values(1, 2, 5));

}  // namespace
}  // namespace mla::layer
