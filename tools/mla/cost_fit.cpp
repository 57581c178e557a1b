#include "mla/cost_fit.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace mla::cli {
namespace {

constexpr size_t kTerms = 6;
using Terms = std::array<double, kTerms>;

// How often each cost is in a point's time: tile, block, block and row, partial row, merge, launch.
Terms terms_of(const CostPoint& point) {
  const double tiles = point.tiles;
  const double blocks = tiles * point.blocks;
  const bool split = point.parts > 1;
  return {tiles,
          blocks,
          blocks * point.rows,
          split ? tiles * point.rows + point.parts : 0,
          split ? 1.0 : 0.0,
          1};
}

double dot(const Terms& a, const Terms& b) {
  double sum = 0;
  for (size_t i = 0; i < kTerms; ++i) sum += a[i] * b[i];
  return sum;
}

/// The normal equations of the terms that are in use; columns scaled to one length, since blocks x
/// rows are thousands of times a merge.
class NormalEquations {
 public:
  explicit NormalEquations(std::span<const CostPoint> points) {
    for (const CostPoint& point : points) {
      Terms row = terms_of(point);
      for (double& term : row) term /= point.ns;  // so that the right side is 1 everywhere
      for (size_t i = 0; i < kTerms; ++i) {
        right_[i] += row[i];
        for (size_t k = 0; k < kTerms; ++k) matrix_[i][k] += row[i] * row[k];
      }
    }
    for (size_t i = 0; i < kTerms; ++i) {
      scale_[i] = matrix_[i][i] > 0 ? 1 / std::sqrt(matrix_[i][i]) : 0;
    }
  }

  /// Solves for the costs in use; a cost without a pivot of its own is 0.
  Terms solve(const std::array<bool, kTerms>& used) const {
    constexpr double kLeastPivot = 1e-9;
    std::array<std::array<double, kTerms + 1>, kTerms> rows{};
    for (size_t i = 0; i < kTerms; ++i) {
      for (size_t k = 0; k < kTerms; ++k) {
        if (used[i] && used[k]) rows[i][k] = matrix_[i][k] * scale_[i] * scale_[k];
      }
      rows[i][kTerms] = used[i] ? right_[i] * scale_[i] : 0;
    }
    std::array<bool, kTerms> solved{};
    for (size_t pivot = 0; pivot < kTerms; ++pivot) {  // positive definite: no exchange of rows
      if (rows[pivot][pivot] < kLeastPivot) continue;
      solved[pivot] = true;
      for (size_t i = 0; i < kTerms; ++i) {
        if (i == pivot) continue;
        const double factor = rows[i][pivot] / rows[pivot][pivot];
        for (size_t k = 0; k <= kTerms; ++k) rows[i][k] -= factor * rows[pivot][k];
      }
    }
    Terms costs{};
    for (size_t i = 0; i < kTerms; ++i) {
      if (solved[i]) costs[i] = rows[i][kTerms] / rows[i][i] * scale_[i];
    }
    return costs;
  }

 private:
  std::array<Terms, kTerms> matrix_{};
  Terms right_{};
  Terms scale_{};
};

// The costs with none below 0: the lowest one is left out until all that are left are not.
Terms solve_positive(const NormalEquations& equations) {
  std::array<bool, kTerms> used;
  used.fill(true);
  while (true) {
    const Terms costs = equations.solve(used);
    const auto lowest = std::ranges::min_element(costs);
    if (*lowest >= 0) return costs;
    used[static_cast<size_t>(lowest - costs.begin())] = false;
  }
}

}  // namespace

CostFit fit_costs(std::span<const CostPoint> points) {
  const Terms costs = solve_positive(NormalEquations(points));
  CostFit fit;
  fit.tile_ns = costs[0];
  fit.block_ns = costs[1];
  fit.block_row_ns = costs[2];
  fit.partial_row_ns = costs[3];
  fit.merge_ns = costs[4];
  fit.launch_ns = costs[5];
  double squares = 0;
  for (const CostPoint& point : points) {
    fit.predicted_ns.push_back(dot(terms_of(point), costs));
    const double share = (fit.predicted_ns.back() - point.ns) / point.ns;
    squares += share * share;
    if (std::abs(share) > std::abs(fit.worst_share)) fit.worst_share = share;
  }
  fit.rms_share = std::sqrt(squares / static_cast<double>(points.size()));
  return fit;
}

}  // namespace mla::cli
