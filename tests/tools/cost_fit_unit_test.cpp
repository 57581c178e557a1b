#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "mla/cost_fit.hpp"

namespace mla::cli {
namespace {

struct Truth {
  double tile, block, block_row, partial_row, merge, launch;

  double ns(const CostPoint& p) const {
    const double part = p.parts > 1 ? p.rows * partial_row : 0;
    const double merges = p.parts > 1 ? merge + p.parts * partial_row : 0;
    return launch + p.tiles * (tile + part + p.blocks * (block + p.rows * block_row)) + merges;
  }
};

std::vector<CostPoint> points_of(const Truth& truth, double noise) {
  std::mt19937 random(5);  // NOLINT(cert-msc51-cpp): the same noise every time
  std::normal_distribution<double> normal(0, noise);
  std::vector<CostPoint> points;
  for (const int32_t rows : {16, 64}) {
    for (const int32_t tiles : {1, 2, 4}) {
      for (const int32_t blocks : {2, 8, 32}) {
        for (const int32_t parts : {1, 4, 16}) {
          CostPoint point{.rows = rows, .tiles = tiles, .blocks = blocks, .parts = parts};
          point.ns = truth.ns(point) * (1 + normal(random));
          points.push_back(point);
        }
      }
    }
  }
  return points;
}

TEST(CostFitUnit, ExactMeasurementsGiveTheirCosts) {
  const CostFit fit = fit_costs(points_of({4000, 2100, 3, 20, 5000, 2500}, 0));
  EXPECT_NEAR(fit.tile_ns, 4000, 1);
  EXPECT_NEAR(fit.block_ns, 2100, 1);
  EXPECT_NEAR(fit.block_row_ns, 3, 0.01);
  EXPECT_NEAR(fit.partial_row_ns, 20, 0.1);
  EXPECT_NEAR(fit.merge_ns, 5000, 5);
  EXPECT_NEAR(fit.launch_ns, 2500, 2);
  EXPECT_LT(fit.rms_share, 1e-6);
}

TEST(CostFitUnit, NoiseStaysInTheResiduals) {
  const Truth truth{4000, 2100, 3, 20, 5000, 2500};
  const std::vector<CostPoint> points = points_of(truth, 0.02);
  const CostFit fit = fit_costs(points);
  EXPECT_NEAR(fit.block_ns, 2100, 100);
  EXPECT_NEAR(fit.block_row_ns, 3, 1.5);
  EXPECT_NEAR(fit.rms_share, 0.02, 0.005);
  ASSERT_EQ(fit.predicted_ns.size(), points.size());
  for (size_t i = 0; i < points.size(); ++i) {
    EXPECT_NEAR(fit.predicted_ns[i] / truth.ns(points[i]), 1, 0.05);
  }
}

TEST(CostFitUnit, NoCostIsBelowZero) {
  // Rows make it faster, which the model can not say.
  const CostFit fit = fit_costs(points_of({4000, 2100, -3, 20, 5000, 2500}, 0));
  EXPECT_EQ(fit.block_row_ns, 0);
  EXPECT_GT(fit.block_ns, 1900);
  EXPECT_GE(fit.launch_ns, 0);
  EXPECT_GT(fit.rms_share, 0);
}

TEST(CostFitUnit, WhatPointsDoNotHoldIsZero) {
  std::vector<CostPoint> points;
  for (const CostPoint& point : points_of({4000, 2100, 3, 20, 5000, 2500}, 0)) {
    if (point.parts == 1) points.push_back(point);
  }
  const CostFit fit = fit_costs(points);
  EXPECT_EQ(fit.partial_row_ns, 0);
  EXPECT_EQ(fit.merge_ns, 0);
  EXPECT_NEAR(fit.block_ns, 2100, 1);
}

}  // namespace
}  // namespace mla::cli
