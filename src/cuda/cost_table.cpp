#include "cuda/cost_table.hpp"

#include "cuda/device_limits.hpp"

namespace mla::cuda {
namespace {

struct Entry {
  std::string_view card;
  std::string_view kernel;
  int32_t kv_lora_rank;
  int32_t qk_rope_head_dim;
  int32_t tile_rows;
  KernelCosts costs;
};

// tile, block, block and row, partial row, merge: lines of `mla bench --calibrate`, but for 512+64
// at 128 rows, whose kernel has become faster since: a fit to its cells of grid.json
// (docs/planner.md).
constexpr Entry kEntries[] = {
    {"NVIDIA H200", "sm90_dense", 512, 64, 64, {4707, 2047.0, 11.7, 97.7, 2524}},
    {"NVIDIA H200", "sm90_dense", 512, 64, 128, {6970, 1881.0, 0, 8, 3000}},
    {"NVIDIA H200", "sm90_dense", 512, 0, 64, {4395, 1828.2, 11.3, 94.4, 2811}},
    {"NVIDIA H200", "sm90_dense", 512, 0, 128, {5127, 1422.8, 4.91, 31, 5678}},
};

}  // namespace

const KernelCosts* find_costs(std::string_view card, std::string_view kernel,
                              const Geometry& geometry, int32_t tile_rows) {
  for (const Entry& entry : kEntries) {
    if (entry.card == card && entry.kernel == kernel &&
        entry.kv_lora_rank == geometry.kv_lora_rank &&
        entry.qk_rope_head_dim == geometry.qk_rope_head_dim && entry.tile_rows == tile_rows) {
      return &entry.costs;
    }
  }
  return nullptr;
}

plan::CostModel calibrated(plan::CostModel model, std::string_view kernel,
                           const KernelQuery& query) {
  const KernelCosts* costs =
      find_costs(device_limits(query.device.index).name, kernel, query.geometry, model.tile_rows);
  if (costs == nullptr) return model;
  model.tile_ns = costs->tile_ns;
  model.block_ns = costs->block_ns;
  model.block_row_ns = costs->block_row_ns;
  model.partial_row_ns = costs->partial_row_ns;
  model.merge_ns = costs->merge_ns;
  return model;
}

}  // namespace mla::cuda
