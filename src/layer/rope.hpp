#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mla/layer_config.hpp"
#include "mla/tensor_view.hpp"

namespace mla::layer {

/// YaRN's growth of magnitudes with the context: 1 + 0.1 mscale ln(factor), 1 up to factor 1.
double yarn_growth(double factor, double mscale);

/// The rotation of a model's rope parts: cos and sin of every pair at the positions of a step.
class Rope {
 public:
  Rope(const RopeConfig& config, int32_t qk_rope_head_dim);

  /// Pairs of columns, the width of the tables; 0 where nothing turns.
  int64_t num_pairs() const { return static_cast<int64_t>(frequencies_.size()); }

  /// Tables [T, num_pairs] of rows [begin, end). Angles are formed in double: at position 100,000
  /// an fp32 angle is wrong by up to 4e-3 radians.
  void fill(std::span<const int32_t> positions, int64_t begin, int64_t end, float* cos,
            float* sin) const;

  /// to = from with its pairs turned by one row of the tables; of the same dtype as `to`, or fp32.
  /// Columns contiguous, [qk_rope_head_dim]; where nothing turns it converts.
  void turn(const void* from, DType from_dtype, void* to, DType to_dtype, const float* cos,
            const float* sin) const;

 private:
  RopeLayout layout_;
  int64_t width_;
  double magnitude_;
  std::vector<double> frequencies_;
};

}  // namespace mla::layer
