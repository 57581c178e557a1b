#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/attention_impl.hpp"
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
  std::span<const plan::Tile> tiles{};
  std::span<const plan::Merge> merges{};
  float sm_scale = 0;
  bool causal = true;
  LseBase lse_base = LseBase::kNatural;
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

  /// Writes a plan within the limits; returns the bytes that it takes.
  size_t write(const PlanParts& parts, std::byte* image) const;
  PlanView view(const std::byte* image) const;

 private:
  size_t qo_indptr_at_ = 0, kv_indptr_at_ = 0, kv_len_at_ = 0, worker_indptr_at_ = 0;
  size_t variable_at_ = 0;
  size_t max_bytes_ = 0;
};

}  // namespace mla
