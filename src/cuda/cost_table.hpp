#pragma once

#include <cstdint>
#include <string_view>

#include "core/attention_impl.hpp"

namespace mla::cuda {

/// What a kernel's work costs on one card, in nanoseconds, as `mla bench --calibrate` measures and
/// prints it. The members are those of plan::CostModel.
struct KernelCosts {
  double tile_ns = 0;
  double block_ns = 0;
  double block_row_ns = 0;
  double partial_row_ns = 0;
  double merge_ns = 0;
};

/// Null where the card was not measured with this kernel, latent shape and tile.
/// card  the driver's name of it, "NVIDIA H200"
const KernelCosts* find_costs(std::string_view card, std::string_view kernel,
                              const Geometry& geometry, int32_t tile_rows);

/// `model`, a kernel's estimate for cards that were not measured, with the costs of the query's
/// card in place of its own where they are known.
plan::CostModel calibrated(plan::CostModel model, std::string_view kernel,
                           const KernelQuery& query);

}  // namespace mla::cuda
