#pragma once

#include <cstdint>

#include "mla/dtype.hpp"
#include "mla/layer_config.hpp"

namespace mla::layer {

/// YaRN's growth of magnitudes with the context: 1 + 0.1 mscale ln(factor), 1 up to factor 1.
double yarn_growth(double factor, double mscale);

/// The rotation of a model's rope parts, as the operations of a device take it.
struct Rope {
  RopeLayout layout = RopeLayout::kNone;
  int64_t width = 0;                    ///< columns of a rope part; may be 0
  double magnitude = 1;                 ///< multiplies cos and sin
  const double* frequencies = nullptr;  ///< [num_pairs()] radians a position, on the device

  /// Pairs of columns; 0 where nothing turns.
  int64_t num_pairs() const { return layout == RopeLayout::kNone ? 0 : width / 2; }
};

/// cos and sin of every pair at a position, [num_pairs] each. Angles are formed in double: at
/// position 100,000 an fp32 angle is wrong by up to 4e-3 radians.
void fill_angles(const Rope& rope, int32_t position, float* cos, float* sin);

/// to = from with its pairs turned; [width], columns contiguous, at any address. Where nothing
/// turns it converts.
void turn(const Rope& rope, const void* from, DType from_dtype, void* to, DType to_dtype,
          const float* cos, const float* sin);

}  // namespace mla::layer
