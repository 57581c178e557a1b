#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "mla/dtype.hpp"

namespace mla {
namespace {

// Every finite 16-bit value survives the way to fp32 and back; between two neighbours the nearer
// one is taken, and the even one at the midpoint.
template <class Half>
void check_round_trip_and_rounding(uint16_t first_infinite) {
  for (uint32_t bits = 0; bits < first_infinite; ++bits) {
    Half low;
    low.bits = static_cast<uint16_t>(bits);
    const auto low_value = static_cast<float>(low);
    ASSERT_EQ(Half(low_value).bits, bits);
    ASSERT_EQ(Half(-low_value).bits, bits | 0x8000U);
    if (bits + 1 == first_infinite) break;
    Half high;
    high.bits = static_cast<uint16_t>(bits + 1);
    const auto high_value = static_cast<float>(high);
    const float middle = low_value + (high_value - low_value) / 2;
    const uint32_t even = (bits & 1U) == 0 ? bits : bits + 1;
    ASSERT_EQ(Half(middle).bits, even) << "between " << low_value << " and " << high_value;
    ASSERT_EQ(Half(std::nextafter(middle, 0.0F)).bits, bits);
    ASSERT_EQ(Half(std::nextafter(middle, high_value)).bits, bits + 1);
  }
}

TEST(DtypeUnit, BFloat16RoundsToNearestEven) { check_round_trip_and_rounding<BFloat16>(0x7f80); }
TEST(DtypeUnit, Float16RoundsToNearestEven) { check_round_trip_and_rounding<Float16>(0x7c00); }

TEST(DtypeUnit, NanAndInfinityStay) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(BFloat16(inf).bits, 0x7f80);
  EXPECT_EQ(Float16(-inf).bits, 0xfc00);
  EXPECT_EQ(Float16(65520.0F).bits, 0x7c00) << "the midpoint above the largest finite value";
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(nan))));
  EXPECT_TRUE(std::isnan(static_cast<float>(Float16(nan))));
}

}  // namespace
}  // namespace mla
