#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/cost_table.hpp"

namespace mla::cli {

/// A batch whose workers all have the same to do, and what a run of it took.
struct CostPoint {
  int32_t rows = 0;    ///< of each tile
  int32_t tiles = 0;   ///< of each worker
  int32_t blocks = 0;  ///< of each tile
  int32_t parts = 1;   ///< of each row; above 1 every tile is a partial result
  double ns = 0;       ///< measured
};

/// The costs that explain measurements best, and how well.
struct CostFit : cuda::KernelCosts {
  double launch_ns = 0;              ///< of every run, whatever is in it; no part of the model
  std::vector<double> predicted_ns;  ///< of each point
  double rms_share = 0;              ///< of (predicted - measured) / measured
  double worst_share = 0;            ///< the largest of these by size
};

/// Least squares of relative errors with no cost below 0. What the planner's model says of a point:
///   launch + tiles (tile + blocks (block + rows block_row)) and, with several parts,
///   tiles rows partial_row + merge + parts partial_row
/// Costs that the points can not tell apart are 0.
CostFit fit_costs(std::span<const CostPoint> points);

}  // namespace mla::cli
