#include "cases/error_bound.hpp"

#include <algorithm>
#include <cmath>

namespace mla::cases {
namespace {

// Distance of neighbours around `value` in a format of `bits` significant bits whose normal values
// start at 2^min_exponent.
double ulp(double value, int bits, int min_exponent) {
  const int exponent = value > 0 ? std::max(std::ilogb(value), min_exponent) : min_exponent;
  return std::ldexp(1.0, exponent + 1 - bits);
}

constexpr int kFloatBits = 24;
constexpr int kFloatMinExponent = -126;  // of bf16 too

}  // namespace

ErrorBound error_bound(const Geometry& geometry, const ReferenceRow& row,
                       double probability_rounding) {
  constexpr double kArithmetic = 1e-5;
  constexpr double kScoresHeldExactly = 32;
  const double two_ulps = 2 * ulp(row.max_abs_score, kFloatBits, kFloatMinExponent);
  const double scores = row.max_abs_score > kScoresHeldExactly ? 2 * two_ulps : 0;
  const double lse = geometry.dtype == DType::kFloat32 ? 1e-5 : 1e-4;
  return {.arithmetic = (kArithmetic + probability_rounding + scores) * row.max_abs_ckv,
          .lse = lse + two_ulps};
}

double probability_rounding(DType dtype, bool rounds_probabilities) {
  if (!rounds_probabilities) return 0;
  return std::ldexp(1.0, dtype == DType::kBFloat16 ? -8 : -11);
}

double value_bound(const ErrorBound& bound, DType dtype, double expected) {
  const double largest = std::abs(expected) + bound.arithmetic;
  if (dtype == DType::kBFloat16) return bound.arithmetic + ulp(largest, 8, kFloatMinExponent) / 2;
  if (dtype == DType::kFloat16) return bound.arithmetic + ulp(largest, 11, -14) / 2;
  return bound.arithmetic;
}

}  // namespace mla::cases
