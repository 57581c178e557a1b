#include "core/plan_image.hpp"

#include <cassert>
#include <cstring>

#include "core/scratch_layout.hpp"

namespace mla {
namespace {

template <class T>
void store(std::byte* image, size_t at, std::span<const T> values) {
  if (!values.empty()) std::memcpy(image + at, values.data(), values.size_bytes());
}

int64_t merged_rows(const plan::Schedule& schedule) {
  if (schedule.merges.empty()) return 0;
  const plan::Merge& last = schedule.merges.back();
  return int64_t{last.rows_before} + last.num_rows;
}

}  // namespace

PlanImage::PlanImage(const Limits& limits, const Geometry& geometry, int32_t num_workers,
                     const SplitPolicy& splits, const plan::CostModel& model) {
  // One request more than the limits: under a lease it owns the bucket's unused tokens.
  const auto requests = static_cast<size_t>(limits.max_rows) + 1;
  ScratchLayout layout;
  layout.book<PlanHeader>(1);
  qo_indptr_at_ = layout.book<int32_t>(requests + 1);
  kv_indptr_at_ = layout.book<int32_t>(requests + 1);
  kv_len_at_ = layout.book<int32_t>(requests);
  worker_indptr_at_ = layout.book<int32_t>(static_cast<size_t>(num_workers) + 1);
  variable_at_ = layout.bytes();
  const int64_t tiles = plan::max_tiles(limits, geometry, num_workers, splits, model);
  layout.book<plan::Tile>(static_cast<size_t>(tiles));
  layout.book<plan::Merge>(static_cast<size_t>(tiles));
  layout.book<int32_t>(static_cast<size_t>(limits.max_listed_pages));
  max_bytes_ = layout.bytes();
}

size_t PlanImage::write(const PlanParts& parts, std::byte* image) const {
  const plan::Schedule& schedule = *parts.schedule;
  ScratchLayout layout(variable_at_);
  const PlanHeader header{.tiles_at = layout.book<plan::Tile>(schedule.tiles.size()),
                          .merges_at = layout.book<plan::Merge>(schedule.merges.size()),
                          .kv_indices_at = layout.book<int32_t>(parts.kv_indices.size()),
                          .num_tiles = static_cast<int64_t>(schedule.tiles.size()),
                          .num_merges = static_cast<int64_t>(schedule.merges.size()),
                          .num_merged_rows = merged_rows(schedule),
                          .num_partial_rows = schedule.num_partial_rows,
                          .sm_scale = parts.options.sm_scale,
                          .causal = parts.options.causal ? 1 : 0,
                          .lse_base = static_cast<int32_t>(parts.options.lse_base),
                          .grid_barrier = 0};
  assert(layout.bytes() <= max_bytes_);
  std::memcpy(image, &header, sizeof(header));
  store(image, qo_indptr_at_, parts.qo_indptr);
  store(image, kv_indptr_at_, parts.kv_indptr);
  store(image, kv_len_at_, parts.kv_len);
  store(image, worker_indptr_at_, std::span<const int32_t>(schedule.worker_indptr));
  store(image, header.tiles_at, std::span<const plan::Tile>(schedule.tiles));
  store(image, header.merges_at, std::span<const plan::Merge>(schedule.merges));
  store(image, header.kv_indices_at, parts.kv_indices);
  return layout.bytes();
}

}  // namespace mla
