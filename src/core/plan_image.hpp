#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/host_device.hpp"
#include "mla/attention.hpp"
#include "plan/schedule.hpp"

namespace mla {

/// What a plan is made of, on its way into an image.
struct PlanParts {
  std::span<const int32_t> qo_indptr;  // [requests + 1]
  std::span<const int32_t> kv_indptr;  // [requests + 1]
  std::span<const int32_t> kv_indices;
  std::span<const int32_t> kv_len;  // [requests]
  const plan::Schedule* schedule = nullptr;
  PlanOptions options{};
};

/// A plan as its kernels find it.
struct PlanView {
  const int32_t* qo_indptr = nullptr;
  const int32_t* kv_indptr = nullptr;
  const int32_t* kv_indices = nullptr;
  const int32_t* kv_len = nullptr;
  const int32_t* worker_indptr = nullptr;
  const plan::Tile* tiles = nullptr;
  const plan::Merge* merges = nullptr;
  int64_t num_tiles = 0, num_merges = 0, num_merged_rows = 0, num_partial_rows = 0;
  float sm_scale = 0;
  bool causal = true;
  LseBase lse_base = LseBase::kNatural;
};

/// What stands at the start of an image.
struct PlanHeader {
  uint64_t tiles_at, merges_at, kv_indices_at;
  int64_t num_tiles, num_merges, num_merged_rows, num_partial_rows;
  float sm_scale;
  int32_t causal;
  int32_t lse_base;
  uint32_t grid_barrier;  ///< 0; of the kernels whose blocks wait for each other, the only word
                          ///< that a run writes
};

/// One plan in one block of memory: what is copied to a device, and what a captured kernel reads at
/// each replay. The arrays of one length per object come first, at offsets that never change; the
/// header says where the others are, so that no more bytes travel than the plan has.
class PlanImage {
 public:
  PlanImage() = default;
  /// For every plan within the limits. Throws InvalidArgument as plan::max_tiles.
  PlanImage(const Limits& limits, const Geometry& geometry, int32_t num_workers,
            const SplitPolicy& splits, const plan::CostModel& model);

  size_t max_bytes() const { return max_bytes_; }
  size_t qo_indptr_at() const { return qo_indptr_at_; }
  size_t kv_len_at() const { return kv_len_at_; }

  MLA_HOST_DEVICE static uint32_t* grid_barrier(std::byte* image) {
    return &reinterpret_cast<PlanHeader*>(image)->grid_barrier;
  }

  /// Writes a plan within the limits; returns the bytes that it takes.
  size_t write(const PlanParts& parts, std::byte* image) const;
  MLA_HOST_DEVICE PlanView view(const std::byte* image) const {
    const PlanHeader& header = *at<PlanHeader>(image, 0);
    PlanView view;
    view.qo_indptr = at<int32_t>(image, qo_indptr_at_);
    view.kv_indptr = at<int32_t>(image, kv_indptr_at_);
    view.kv_indices = at<int32_t>(image, header.kv_indices_at);
    view.kv_len = at<int32_t>(image, kv_len_at_);
    view.worker_indptr = at<int32_t>(image, worker_indptr_at_);
    view.tiles = at<plan::Tile>(image, header.tiles_at);
    view.merges = at<plan::Merge>(image, header.merges_at);
    view.num_tiles = header.num_tiles;
    view.num_merges = header.num_merges;
    view.num_merged_rows = header.num_merged_rows;
    view.num_partial_rows = header.num_partial_rows;
    view.sm_scale = header.sm_scale;
    view.causal = header.causal != 0;
    view.lse_base = static_cast<LseBase>(header.lse_base);
    return view;
  }

 private:
  template <class T>
  MLA_HOST_DEVICE static const T* at(const std::byte* image, size_t offset) {
    return reinterpret_cast<const T*>(image + offset);
  }

  size_t qo_indptr_at_ = 0, kv_indptr_at_ = 0, kv_len_at_ = 0, worker_indptr_at_ = 0;
  size_t variable_at_ = 0;
  size_t max_bytes_ = 0;
};

}  // namespace mla
