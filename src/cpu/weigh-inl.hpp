#pragma once

// Stage 4, the running softmax of each row: scores become weights. For attention-inl.hpp.

#include <cstdint>

#include "cpu/tile-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {

// Scores become weights relative to the running maximum; `sum` and `rescale` follow.
template <class T>
HWY_INLINE void weigh_block(const TileRun<T>& run, int32_t panel, int64_t begin, int32_t num_keys) {
  const FloatTag d;
  const IntTag ints;
  const int64_t stride = int64_t{run.panel_vectors(panel)} * kLanes;
  const int32_t num_parts = run.by_dot ? 1 : run.num_parts();
  const int64_t part = run.panel_scores(panel, 1) - run.panel_scores(panel, 0);
  const Vec scale = hn::Set(d, run.params.sm_scale);
  const int32_t first_row = panel * kPanelRows;
  const bool all_visible =
      run.ends[first_row] >= begin + num_keys;  // rows see more from row to row
  for (int32_t row = first_row; row < first_row + stride; row += kLanes) {
    float* scores = run.panel_scores(panel, 0) + (row - first_row);
    if (!all_visible) {
      const auto end = hn::Load(ints, run.ends + row);
      for (int32_t k = 0; k < num_keys; ++k) {
        const auto key = hn::Set(ints, static_cast<int32_t>(begin + k));
        const auto visible = hn::RebindMask(d, hn::Lt(key, end));
        float* at = scores + k * stride;
        hn::Store(hn::IfThenElse(visible, hn::Load(d, at), hn::Set(d, -kInfinity)), d, at);
        for (int32_t i = 1; i < num_parts; ++i) {
          hn::Store(hn::IfThenElseZero(visible, hn::Load(d, at + i * part)), d, at + i * part);
        }
      }
    }
    Vec largest = hn::Set(d, -kInfinity);
    for (int32_t k = 0; k < num_keys; ++k) {
      Vec score = hn::Load(d, scores + k * stride);
      for (int32_t i = 1; i < num_parts; ++i) {
        score = hn::Add(score, hn::Load(d, scores + k * stride + i * part));
      }
      largest = hn::Max(score, largest);
    }
    const Vec old_max = hn::Load(d, run.maximum + row);
    const Vec new_max = hn::Max(hn::Mul(largest, scale), old_max);
    // A row that has seen no key yet has the maximum -inf; less 0, its weights are 0, not NaN.
    const auto seen = hn::Ne(new_max, hn::Set(d, -kInfinity));
    const Vec base = hn::IfThenElseZero(seen, new_max);
    // Scores so large that the rounding of `above` below would be more than a weight can stand (one
    // unit in the last place is 1/8 from here on): they are weighed as the maximum was found, so
    // that the largest has weight 1.
    const auto huge = hn::Gt(hn::Abs(base), hn::Set(d, 1048576.0F));
    const bool any_huge = !hn::AllFalse(d, huge);
    Vec sum = hn::Zero(d);
    for (int32_t k = 0; k < num_keys; ++k) {
      float* at = scores + k * stride;
      // From the base on, so that what is rounded becomes small: the weight of a score near the
      // maximum is exact to more than the last place of the score.
      Vec above = hn::MulSub(hn::Load(d, at), scale, base);
      for (int32_t i = 1; i < num_parts; ++i) {
        above = hn::MulAdd(hn::Load(d, at + i * part), scale, above);
      }
      if (any_huge) {
        Vec score = hn::Load(d, at);
        for (int32_t i = 1; i < num_parts; ++i) score = hn::Add(score, hn::Load(d, at + i * part));
        // The minimum keeps the compiler from fusing the two, which would not round the product.
        const Vec product = hn::Min(hn::Mul(score, scale), base);
        above = hn::IfThenElse(huge, hn::Sub(product, base), above);
      }
      const Vec weight = exp_near_zero(above);
      hn::Store(weight, d, at);
      sum = hn::Add(sum, weight);
    }
    const Vec rescale = exp_near_zero(hn::Sub(old_max, base));
    hn::Store(new_max, d, run.maximum + row);
    hn::Store(rescale, d, run.rescale + row);
    hn::Store(hn::MulAdd(hn::Load(d, run.sum + row), rescale, sum), d, run.sum + row);
  }
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
