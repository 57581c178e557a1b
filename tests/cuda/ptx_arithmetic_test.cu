#include <cmath>
#include <limits>
#include <random>

#include "cuda/ptx_test.cuh"

// Matrix products and numbers.
namespace mla::cuda::sm90 {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Matrix products of small integers, which are exact in any order.

template <class T>
std::vector<T> integers(uint32_t seed, size_t count) {
  std::mt19937 random(seed);
  std::vector<T> values;
  for (size_t i = 0; i < count; ++i) values.push_back(T(static_cast<float>(random() % 17) - 8));
  return values;
}

struct Place {
  int row, column;
};

/// Of sum i of a thread of the warpgroup.
Place place_of_sum(int thread, int i) {
  const int warp = thread / kLanes, lane = thread % kLanes;
  return {16 * warp + lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
}

/// Each thread's sums, against start + a b with a [64, depth] and b [depth, columns] by value_of_b.
template <class T, class ValueOfB>
void expect_sums(const std::vector<float>& sums, const std::vector<float>& start,
                 const std::vector<T>& a, int depth, int columns, const ValueOfB& value_of_b) {
  const int sums_of_thread = kRows * columns / kGroupThreads;
  for (int thread = 0; thread < kGroupThreads; ++thread) {
    for (int i = 0; i < sums_of_thread; ++i) {
      const Place at = place_of_sum(thread, i);
      float expected = start[thread * sums_of_thread + i];
      for (int k = 0; k < depth; ++k) {
        expected += static_cast<float>(a[at.row * depth + k]) *
                    static_cast<float>(value_of_b(k, at.column));
      }
      ASSERT_EQ(sums[thread * sums_of_thread + i], expected)
          << "thread " << thread << ", sum " << i << ": row " << at.row << ", column " << at.column;
    }
  }
}

constexpr int kScoreStrips = 2;
constexpr int kScoreDepth = kScoreStrips * kStripColumns;
constexpr int kScoreSums = 32;

template <class T>
__global__ void __launch_bounds__(kGroupThreads)
    scores_kernel(const T* a, const T* b, MatrixLayout b_layout, const float* start,
                  bool accumulate, float* sums) {
  __shared__ __align__(kSwizzleAlignment) std::byte a_shared[kScoreStrips * kStripBytes];
  __shared__ __align__(kSwizzleAlignment) std::byte b_shared[kScoreStrips * kStripBytes];
  to_shared(a_shared, a, sizeof(a_shared));
  to_shared(b_shared, b, sizeof(b_shared));
  float d[kScoreSums];
#pragma unroll
  for (int i = 0; i < kScoreSums; ++i) d[i] = start[threadIdx.x * kScoreSums + i];
  const uint64_t a_matrix = matrix_descriptor(uniform(shared_address(a_shared)));
  const uint64_t b_matrix =
      matrix_descriptor(uniform(shared_address(b_shared)), b_layout.eight_rows * sizeof(T));
  products_begin();
#pragma unroll
  for (int k = 0; k < kScoreDepth / 16; ++k) {
    const uint32_t strip = k / 4, bytes = k % 4 * 32;
    multiply_scores<T>(d, advance(a_matrix, strip * kStripBytes + bytes),
                       advance(b_matrix, strip * b_layout.strip * sizeof(T) + bytes),
                       accumulate || k > 0);
  }
  products_commit();
  products_wait<0>();
  products_arrive(d);
#pragma unroll
  for (int i = 0; i < kScoreSums; ++i) sums[threadIdx.x * kScoreSums + i] = d[i];
}

constexpr int kValueDepth = kRows;
constexpr int kValueColumns = 256;
constexpr int kValueSums = 128;

/// `a` is swizzled for shared memory, and for registers as it is.
template <class T, bool kFromRegisters>
__global__ void __launch_bounds__(kGroupThreads)
    values_kernel(const T* a, const T* b, MatrixLayout b_layout, const float* start, float* sums) {
  __shared__ __align__(kSwizzleAlignment) std::byte a_shared[kStripBytes];
  __shared__ __align__(kSwizzleAlignment)
      std::byte b_shared[kValueColumns / kStripColumns * kStripBytes];
  if constexpr (!kFromRegisters) to_shared(a_shared, a, sizeof(a_shared));
  to_shared(b_shared, b, sizeof(b_shared));
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t row = threadIdx.x / kLanes * 16 + lane / 4, column = lane % 4 * 2;
  uint32_t a_registers[kValueDepth / 16][4];
  if constexpr (kFromRegisters) {
#pragma unroll
    for (int k = 0; k < kValueDepth / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const T* pair = a + (row + i % 2 * 8) * kValueDepth + k * 16 + column + i / 2 * 8;
        a_registers[k][i] = *reinterpret_cast<const uint32_t*>(pair);
      }
    }
  }
  float d[kValueSums];
#pragma unroll
  for (int i = 0; i < kValueSums; ++i) d[i] = start[threadIdx.x * kValueSums + i];
  const uint64_t a_matrix = matrix_descriptor(uniform(shared_address(a_shared)));
  const uint64_t b_matrix =
      matrix_descriptor(uniform(shared_address(b_shared)), b_layout.eight_rows * sizeof(T),
                        b_layout.strip * sizeof(T));
  products_begin();
#pragma unroll
  for (int k = 0; k < kValueDepth / 16; ++k) {
    const uint64_t b_rows = advance(b_matrix, k * 2 * b_layout.eight_rows * sizeof(T));
    if constexpr (kFromRegisters) {
      multiply_values<T>(d, a_registers[k], b_rows);
    } else {
      multiply_values<T>(d, advance(a_matrix, k * 32), b_rows);
    }
  }
  products_commit();
  products_wait<0>();
  products_arrive(d);
#pragma unroll
  for (int i = 0; i < kValueSums; ++i) sums[threadIdx.x * kValueSums + i] = d[i];
}

const char* trace_of(MatrixLayout layout) {
  return layout.strip == kByStrips.strip ? "b strip after strip" : "b eight rows after eight";
}

template <class T>
class PtxOfElements : public Ptx {
 protected:
  template <bool kFromRegisters>
  static void check_values() {
    const auto a = integers<T>(3, kRows * kValueDepth);
    const auto b = integers<T>(4, kValueDepth * kValueColumns);
    const DeviceArray<float> start(kCuda, integers<float>(5, kGroupThreads * kValueSums));
    const DeviceArray<T> device_a(kCuda, kFromRegisters ? a : swizzled(a, kValueDepth));
    for (const MatrixLayout layout : {kByStrips, by_rows(kValueColumns)}) {
      SCOPED_TRACE(trace_of(layout));
      const DeviceArray<T> device_b(kCuda, swizzled(b, kValueColumns, layout));
      auto sums = results<float>(kGroupThreads * kValueSums);
      launch(&values_kernel<T, kFromRegisters>, 1, kGroupThreads, device_a.data(), device_b.data(),
             layout, start.data(), sums.data());
      expect_sums(sums.read(), start.host, a, kValueDepth, kValueColumns,
                  [&](int k, int column) { return b[k * kValueColumns + column]; });
    }
  }
};
using Elements = testing::Types<__nv_bfloat16, __half>;
TYPED_TEST_SUITE(PtxOfElements, Elements);

TYPED_TEST(PtxOfElements, ScoresAreTheProductWithTheTransposeAndAddWhereTheyAccumulate) {
  using T = TypeParam;
  const auto a = integers<T>(1, kRows * kScoreDepth), b = integers<T>(2, kRows * kScoreDepth);
  const DeviceArray<T> device_a(kCuda, swizzled(a, kScoreDepth));
  const DeviceArray<float> start(kCuda, integers<float>(5, kGroupThreads * kScoreSums));
  const std::vector<float> zeros(start.host.size());
  for (const MatrixLayout layout : {kByStrips, by_rows(kScoreDepth)}) {
    SCOPED_TRACE(trace_of(layout));
    const DeviceArray<T> device_b(kCuda, swizzled(b, kScoreDepth, layout));
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(accumulate ? "accumulating" : "from zero");
      auto sums = results<float>(kGroupThreads * kScoreSums);
      launch(&scores_kernel<T>, 1, kGroupThreads, device_a.data(), device_b.data(), layout,
             start.data(), accumulate, sums.data());
      expect_sums(sums.read(), accumulate ? start.host : zeros, a, kScoreDepth, kRows,
                  [&](int k, int column) { return b[column * kScoreDepth + k]; });
    }
  }
}

TYPED_TEST(PtxOfElements, ValuesAreTheProductWithRowsOfSharedMemory) {
  this->template check_values<false>();
}

TYPED_TEST(PtxOfElements, ValuesByWeightsInRegistersAreTheSame) {
  this->template check_values<true>();
}

// Numbers.

__global__ void exp2_kernel(const float* x, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] = exp2_approximate(x[i]);
}

std::vector<float> exp2_of(const std::vector<float>& x) {
  const DeviceArray<float> device_x(kCuda, x);
  auto to = results<float>(x.size());
  launch(&exp2_kernel, 1, 1, device_x.data(), static_cast<int>(x.size()), to.data());
  return to.read();
}

TEST_F(Ptx, Exp2IsWithinItsErrorWhereTheResultIsNormal) {
  std::vector<float> x;
  for (int i = -126; i < 128; ++i) x.push_back(static_cast<float>(i));
  std::mt19937 random(1);
  std::uniform_real_distribution<float> wide(-125.9F, 127.9F), narrow(-1, 1);
  for (int i = 0; i < 2000; ++i) {
    x.push_back(wide(random));
    x.push_back(narrow(random));
  }
  const std::vector<float> got = exp2_of(x);
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = std::exp2(static_cast<double>(x[i]));
    EXPECT_NEAR(got[i] / expected, 1, std::exp2(-22)) << "2^" << x[i];
  }
}

TEST_F(Ptx, Exp2IsZeroBelowTheNormalNumbersAndKeepsInfinitiesAndNan) {
  const std::vector<float> x = {-126.01F, -127, -140, -149, -1e30F, -kInf, 128, 1e30F, kInf};
  const std::vector<float> expected = {0, 0, 0, 0, 0, 0, kInf, kInf, kInf};
  EXPECT_EQ(exp2_of(x), expected);
  EXPECT_TRUE(std::isnan(exp2_of({kNan})[0]));
}

template <class T>
__global__ void pack_kernel(const float* values, int pairs, uint32_t* to) {
  for (int i = 0; i < pairs; ++i) to[i] = pack<T>(values[2 * i], values[2 * i + 1]);
}

struct Rounding {
  float value;
  uint16_t bits;
};

// 1 and a half of the last bit, three halves of it, a little more than a half; the same of -1; past
// the largest number.
template <class T>
const std::vector<Rounding> kRoundings;
template <>
const std::vector<Rounding> kRoundings<__nv_bfloat16> = {
    {1 + 0x1p-8F, 0x3f80},  {1 + 3 * 0x1p-8F, 0x3f82},  {1 + 0x1p-8F + 0x1p-20F, 0x3f81},
    {-1 - 0x1p-8F, 0xbf80}, {-1 - 3 * 0x1p-8F, 0xbf82}, {-1 - 0x1p-8F - 0x1p-20F, 0xbf81},
    {0x1.fep+127F, 0x7f7f}, {0x1.ffp+127F, 0x7f80},     {0x1.fefffep+127F, 0x7f7f},
    {-kInf, 0xff80}};
template <>
const std::vector<Rounding> kRoundings<__half> = {{1 + 0x1p-11F, 0x3c00},
                                                  {1 + 3 * 0x1p-11F, 0x3c02},
                                                  {1 + 0x1p-11F + 0x1p-20F, 0x3c01},
                                                  {-1 - 0x1p-11F, 0xbc00},
                                                  {-1 - 3 * 0x1p-11F, 0xbc02},
                                                  {-1 - 0x1p-11F - 0x1p-20F, 0xbc01},
                                                  {65504, 0x7bff},
                                                  {65520, 0x7c00},
                                                  {65519, 0x7bff},
                                                  {-kInf, 0xfc00}};

TYPED_TEST(PtxOfElements, APairIsRoundedToNearestEvenAndItsFirstIsTheLowerHalf) {
  const auto& roundings = kRoundings<TypeParam>;
  std::vector<float> values;
  for (const Rounding& rounding : roundings) values.push_back(rounding.value);
  const DeviceArray<float> device_values(kCuda, values);
  const size_t pairs = roundings.size() / 2;
  auto to = results<uint32_t>(pairs);
  launch(&pack_kernel<TypeParam>, 1, 1, device_values.data(), static_cast<int>(pairs), to.data());
  to.read();
  for (size_t i = 0; i < roundings.size(); ++i) {
    EXPECT_EQ(to.host[i / 2] >> i % 2 * 16 & 0xffff, roundings[i].bits) << values[i];
  }
}

}  // namespace
}  // namespace mla::cuda::sm90
