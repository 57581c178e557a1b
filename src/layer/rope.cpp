#include "layer/rope.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "layer/rows.hpp"

namespace mla {
namespace {

// The pair, not rounded, that turns `rotations` times over the original context.
double pair_of_rotations(double rotations, double width, double theta, double context) {
  using Limits = std::numeric_limits<double>;
  // Within the range of doubles, so that no two pairs are infinite and their distance no number.
  const double turns =
      std::clamp(context / (rotations * 2 * std::numbers::pi), Limits::min(), Limits::max());
  return width * std::log(turns) / (2 * std::log(theta));
}

// How much of each pair's frequency is interpolated: 0 for the fast pairs, 1 for the slow.
std::vector<double> yarn_ramp(const YarnConfig& yarn, double theta, int32_t width) {
  const double context = yarn.original_max_position_embeddings;
  double low = pair_of_rotations(yarn.beta_fast, width, theta, context);
  double high = pair_of_rotations(yarn.beta_slow, width, theta, context);
  if (yarn.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, width - 1.0);
  if (low == high) high += 0.001;  // the published code's guard against 0 / 0
  std::vector<double> ramp(static_cast<size_t>(width / 2));
  for (size_t i = 0; i < ramp.size(); ++i) {
    ramp[i] = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
  }
  return ramp;
}

}  // namespace

double layer::yarn_growth(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

std::vector<double> rope_frequencies(const RopeConfig& rope, int32_t qk_rope_head_dim) {
  if (rope.layout == RopeLayout::kNone) return {};
  std::vector<double> frequencies(static_cast<size_t>(qk_rope_head_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = std::pow(rope.theta, -2.0 * static_cast<double>(i) / qk_rope_head_dim);
  }
  if (rope.yarn) {
    const std::vector<double> ramp = yarn_ramp(*rope.yarn, rope.theta, qk_rope_head_dim);
    for (size_t i = 0; i < frequencies.size(); ++i) {
      frequencies[i] *= ramp[i] / rope.yarn->factor + (1 - ramp[i]);
    }
  }
  return frequencies;
}

double rope_magnitude(const RopeConfig& rope) {
  if (!rope.yarn) return 1;
  const YarnConfig& yarn = *rope.yarn;
  if (yarn.attention_factor) return *yarn.attention_factor;
  if (yarn.mscale != 0 && yarn.mscale_all_dim != 0) {
    return layer::yarn_growth(yarn.factor, yarn.mscale) /
           layer::yarn_growth(yarn.factor, yarn.mscale_all_dim);
  }
  return layer::yarn_growth(yarn.factor, 1);
}

namespace layer {

void fill_angles(const Rope& rope, int32_t position, float* cos, float* sin) {
  for (int64_t i = 0; i < rope.num_pairs(); ++i) {
    const double angle = position * rope.frequencies[i];
    cos[i] = static_cast<float>(std::cos(angle) * rope.magnitude);
    sin[i] = static_cast<float>(std::sin(angle) * rope.magnitude);
  }
}

void turn(const Rope& rope, const void* from, DType from_dtype, void* to, DType to_dtype,
          const float* cos, const float* sin) {
  const bool interleaved = rope.layout == RopeLayout::kInterleaved;
  const int64_t partner = interleaved ? 1 : rope.width / 2;
  with_type(from_dtype, [&](auto from_type) {
    with_type(to_dtype, [&](auto to_type) {
      using From = decltype(from_type);
      using To = decltype(to_type);
      if (rope.layout == RopeLayout::kNone) {
        for (int64_t c = 0; c < rope.width; ++c) store<To>(to, c, load<From>(from, c));
      }
      for (int64_t i = 0; i < rope.num_pairs(); ++i) {
        const int64_t a = interleaved ? 2 * i : i;
        const float x = load<From>(from, a);
        const float y = load<From>(from, a + partner);
        store<To>(to, a, x * cos[i] - y * sin[i]);
        store<To>(to, a + partner, y * cos[i] + x * sin[i]);
      }
    });
  });
}

}  // namespace layer
}  // namespace mla
