#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "cases/random.hpp"
#include "device/test_device.hpp"
#include "layer/operations.hpp"
#include "layer/product.hpp"

// What a layer asks of a CUDA device, against the same on the CPU.
namespace mla::layer {
namespace {

using test::kCuda;

// Numbers that both read.
template <class T>
class Input {
 public:
  explicit Input(std::vector<T> values)
      : values_(std::move(values)), memory_(kCuda, values_.size() * sizeof(T)) {
    memory_.copy_from_host(values_.data(), memory_.bytes());
    synchronize(kCuda);
  }
  const T* on(Device device) const {
    return device == kCuda ? static_cast<const T*>(memory_.data()) : values_.data();
  }

 private:
  std::vector<T> values_;
  DeviceMemory memory_;
};

// [rows, width] that each writes to; NaN where it did not.
class Output {
 public:
  Output(DType dtype, int64_t rows, int64_t width)
      : dtype_(dtype),
        count_(rows * width),
        host_(static_cast<size_t>(count_ * size_of(dtype)), std::byte{0xff}),
        memory_(kCuda, host_.size()) {
    memory_.fill(0xff);
    synchronize(kCuda);
  }
  void* on(Device device) { return device == kCuda ? memory_.data() : host_.data(); }

  // Equal up to one rounding to the dtype and to the fp32 arithmetic before it.
  void expect_equal() {
    synchronize(kCuda);
    std::vector<std::byte> device(host_.size());
    memory_.copy_to_host(device.data(), device.size());
    synchronize(kCuda);
    const double unit = dtype_ == DType::kFloat32    ? 0x1p-22
                        : dtype_ == DType::kBFloat16 ? 0x1p-7
                                                     : 0x1p-10;
    for (int64_t i = 0; i < count_; ++i) {
      const double wanted = element(host_, i);
      const double got = element(device, i);
      if (std::isnan(wanted)) {
        ASSERT_TRUE(std::isnan(got)) << "written at " << i;
      } else {
        ASSERT_NEAR(got, wanted, std::abs(wanted) * unit + 1e-6) << i;
      }
    }
  }

 private:
  float element(const std::vector<std::byte>& bytes, int64_t index) const {
    const auto read = [&](auto value) {
      std::memcpy(&value, bytes.data() + index * int64_t{sizeof(value)}, sizeof(value));
      return static_cast<float>(value);
    };
    if (dtype_ == DType::kFloat32) return read(float{});
    return dtype_ == DType::kBFloat16 ? read(BFloat16{}) : read(Float16{});
  }

  DType dtype_;
  int64_t count_;
  std::vector<std::byte> host_;
  DeviceMemory memory_;
};

std::vector<float> random_floats(uint64_t seed, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  cases::fill_uniform(cases::row_key(seed, 0, 0), DType::kFloat32, values.data(), count);
  return values;
}

// Near and far, up to the last one that there is.
std::vector<int32_t> positions_of(int64_t num_tokens) {
  std::vector<int32_t> positions(static_cast<size_t>(num_tokens));
  for (size_t t = 0; t < positions.size(); ++t) {
    positions[t] = static_cast<int32_t>(t * 131 % 200'000);
  }
  positions.back() = INT32_MAX;
  return positions;
}

// A rotation whose table both read.
class RopeInput {
 public:
  RopeInput(RopeLayout layout, int32_t width)
      : layout_(layout), width_(width), frequencies_(table(layout, width)) {}
  Rope on(Device device) const {
    return {.layout = layout_,
            .width = width_,
            .magnitude = 1.25,
            .frequencies = frequencies_.on(device)};
  }

 private:
  static std::vector<double> table(RopeLayout layout, int32_t width) {
    RopeConfig config;
    config.layout = layout;
    YarnConfig& yarn = config.yarn.emplace();
    yarn.factor = 4;
    yarn.original_max_position_embeddings = 4096;
    return rope_frequencies(config, width);
  }

  RopeLayout layout_;
  int32_t width_;
  Input<double> frequencies_;
};

constexpr RopeLayout kLayouts[] = {RopeLayout::kNone, RopeLayout::kInterleaved, RopeLayout::kHalf};

class CudaOperations : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (const std::string reason = test::missing(kCuda); !reason.empty()) GTEST_SKIP() << reason;
    cuda_ = make_operations({.device = kCuda});
  }

  // Runs fn(operations, device) on both.
  template <class Fn>
  void on_both(const Fn& fn) {
    fn(*host_, Device{});
    fn(*cuda_, kCuda);
  }

  void expect_same_norms(int64_t tokens, int64_t width) {
    SCOPED_TRACE(testing::Message() << tokens << " rows of " << width);
    const Input<float> latents(random_floats(1, tokens * width)), weights(random_floats(2, width));
    Output out(GetParam(), tokens, width);
    on_both([&](Operations& operations, Device device) {
      operations.norm_rows(
          contiguous_view(static_cast<const void*>(latents.on(device)), std::array{tokens, width},
                          DType::kFloat32, device),
          {.weights = weights.on(device), .width = width, .eps = 1e-6},
          contiguous_view(out.on(device), std::array{tokens, width}, GetParam(), device), {});
    });
    out.expect_equal();
  }

  // Tokens go to every second row of a cache in which they have room, but for some that go nowhere;
  // or, without slots, each to its own.
  void expect_same_rows(int64_t tokens, int64_t rank, int32_t rope_width, RopeLayout layout,
                        bool has_slots) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens, " << rank << "+" << rope_width
                                    << " layout " << static_cast<int>(layout) << " " << has_slots);
    const int64_t width = rank + rope_width;
    const int64_t num_rows = has_slots ? 2 * tokens + 3 : tokens;
    std::vector<int64_t> places(static_cast<size_t>(tokens));
    for (int64_t t = 0; t < tokens; ++t) places[static_cast<size_t>(t)] = 2 * (tokens - t);
    places[0] = -1;
    if (tokens > 2) places[2] = num_rows;  // outside, which is skipped as well
    const Input<int64_t> slots(places);
    const Input<int32_t> positions(positions_of(tokens));
    const Input<float> latents(random_floats(3, tokens * width)), weights(random_floats(4, rank));
    const RopeInput rope(layout, rope_width);
    Output cache(GetParam(), num_rows, width);
    on_both([&](Operations& operations, Device device) {
      operations.store_latents(contiguous_view(static_cast<const void*>(latents.on(device)),
                                               std::array{tokens, width}, DType::kFloat32, device),
                               positions.on(device),
                               {.weights = weights.on(device), .width = rank, .eps = 1e-6},
                               rope.on(device),
                               {.data = cache.on(device),
                                .num_rows = num_rows,
                                .dtype = GetParam(),
                                .slots = has_slots ? slots.on(device) : nullptr},
                               {});
    });
    cache.expect_equal();
  }

  // Queries [tokens, heads, nope + rope_width], with a gap behind each head and each token.
  void expect_same_queries(int64_t tokens, int64_t heads, int64_t nope, int32_t rope_width,
                           RopeLayout layout) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens, " << heads << " heads, " << nope << "+"
                                    << rope_width << " layout " << static_cast<int>(layout));
    const DType dtype = GetParam();
    const int64_t head_stride = nope + rope_width + 1;
    const int64_t token_stride = heads * head_stride + 5;
    std::vector<std::byte> values(static_cast<size_t>(tokens * token_stride * size_of(dtype)));
    cases::fill_uniform(cases::row_key(5, 0, 0), dtype, values.data(), tokens * token_stride);
    const Input<std::byte> queries(values);
    const Input<int32_t> positions(positions_of(tokens));
    const RopeInput rope(layout, rope_width);
    Output out(dtype, tokens * heads, rope_width);
    on_both([&](Operations& operations, Device device) {
      const ConstTensor<3> q{queries.on(device) + nope * size_of(dtype),
                             {tokens, heads, rope_width},
                             {token_stride, head_stride, 1},
                             device,
                             dtype};
      const Tensor<3> to = contiguous_view(
          out.on(device), std::array{tokens, heads, int64_t{rope_width}}, dtype, device);
      operations.turn_queries(q, positions.on(device), rope.on(device), to, {});
    });
    out.expect_equal();
  }

  std::unique_ptr<Operations> host_ = make_operations({});
  std::unique_ptr<Operations> cuda_;
};

TEST_P(CudaOperations, NormsOfEveryWidthAreTheCpus) {
  for (const int64_t width : {1, 7, 8, 33, 255, 257, 512, 1536, 8192}) {
    expect_same_norms(1, width);
    expect_same_norms(19, width);
  }
}

TEST_P(CudaOperations, CacheRowsOfEveryWidthAreTheCpus) {
  constexpr std::pair<int64_t, int32_t> kWidths[] = {{512, 64}, {512, 0}, {1, 2},
                                                     {7, 2},    {65, 6},  {100, 600}};
  for (const auto& [rank, rope_width] : kWidths) {
    for (const RopeLayout layout : kLayouts) {
      for (const bool has_slots : {false, true}) {
        expect_same_rows(1, rank, rope_width, layout, has_slots);
        expect_same_rows(40, rank, rope_width, layout, has_slots);
      }
    }
  }
  expect_same_rows(9, 5, 3, RopeLayout::kNone, true);  // odd, which only what turns may not be
}

TEST_P(CudaOperations, QueriesOfEveryWidthAreTheCpus) {
  for (const int64_t heads : {1, 3, 128}) {
    for (const RopeLayout layout : kLayouts) {
      expect_same_queries(1, heads, 128, 64, layout);
      expect_same_queries(17, heads, 5, 2, layout);
      expect_same_queries(3, heads, 1, 70, layout);
    }
  }
  expect_same_queries(2, 3, 0, 8190, RopeLayout::kHalf);
  expect_same_queries(9, 2, 4, 3, RopeLayout::kNone);
}

// More tokens than a launch has blocks.
TEST_P(CudaOperations, AMillionTokensAreTheCpus) {
  constexpr int64_t kTokens = (1 << 20) + 5;
  expect_same_norms(kTokens, 3);
  expect_same_rows(kTokens, 3, 2, RopeLayout::kHalf, true);
  expect_same_queries(kTokens, 1, 0, 2, RopeLayout::kInterleaved);
}

TEST_P(CudaOperations, ProductsOfEveryShapeAreRight) {
  std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
  shapes.insert(shapes.end(), {{150, 6, 64, 40}, {1, 16, 512, 128}, {3, 2, 96, 1000}});
  for (const Shape& s : shapes) {
    for (const bool turned : {false, true}) {
      for (const DType out : {GetParam(), DType::kFloat32}) {
        SCOPED_TRACE(testing::Message() << s.m << " " << s.batch << " " << s.n << " " << s.k);
        expect_product(
            s, GetParam(), out, turned, kCuda,
            [&](const auto& x, const auto& w, const auto& y) { cuda_->gemm(x, w, y, {}); });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, CudaOperations,
                         testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

}  // namespace
}  // namespace mla::layer
