#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "core/attention_impl.hpp"

// Where the rows of a tile lie in the caller's tensors, and what they may see: cpu/rows.hpp for
// kernels.
namespace mla::cuda {

/// What a kernel of this folder gets: the launch's tensors and the place of the plan.
struct KernelParams {
  AttentionParams tensors{};
  PlanImage image{};
  std::byte* plan = nullptr;
  int32_t num_requests = 0;
};

inline KernelParams kernel_params(const AttentionLaunch& launch) {
  return {launch.params, launch.image, launch.plan, launch.num_requests};
}

struct RowPlace {
  int64_t token;
  int32_t head;
};

/// A plan has at most 2^24 tiles of at most 128 rows: rows fit in 32 bits, and dividing those is
/// short.
__device__ inline int32_t query_of(int64_t row, int32_t num_heads) {
  return static_cast<int32_t>(static_cast<uint32_t>(row) / static_cast<uint32_t>(num_heads));
}

/// Of a request whose first query is token `first_token`.
__device__ inline RowPlace place_of(int32_t first_token, int32_t num_heads, int64_t row) {
  const int32_t query = query_of(row, num_heads);
  return {int64_t{first_token} + query, static_cast<int32_t>(row - int64_t{query} * num_heads)};
}

__device__ inline RowPlace place_of(const PlanView& plan, int32_t num_heads, int32_t request,
                                    int64_t row) {
  return place_of(plan.qo_indptr[request], num_heads, row);
}

/// Keys 0 .. visible - 1 of the request are what row `row` of it may see.
__device__ inline int32_t visible_keys(const PlanView& plan, int32_t num_heads, int32_t request,
                                       int64_t row) {
  const int32_t num_keys = plan.kv_len[request];
  if (!plan.causal) return num_keys;
  const int32_t num_queries = plan.qo_indptr[request + 1] - plan.qo_indptr[request];
  const int32_t query = query_of(row, num_heads);
  return max(num_keys - num_queries + query + 1, 0);
}

/// Page and slot of a request's key.
struct KeyPlace {
  int64_t page;
  int64_t slot;
};

/// Which of its request's pages holds a key.
__device__ inline uint32_t page_of_key(uint32_t key, int32_t page_size) {
  return key / static_cast<uint32_t>(page_size);
}

/// Of a key whose page was looked up.
__device__ inline KeyPlace place_in_page(int32_t page, uint32_t key, int32_t page_size) {
  return {page, key % static_cast<uint32_t>(page_size)};
}

__device__ inline KeyPlace place_of_key(const int32_t* pages, uint32_t key, int32_t page_size) {
  return place_in_page(pages[page_of_key(key, page_size)], key, page_size);
}

__device__ inline void write_lse(const AttentionParams& tensors, const PlanView& plan, RowPlace at,
                                 float natural_lse) {
  if (tensors.lse == nullptr) return;
  tensors.lse[at.token * tensors.lse_token_stride + at.head * tensors.lse_head_stride] =
      plan.lse_base == LseBase::kTwo ? natural_lse * std::numbers::log2e_v<float> : natural_lse;
}

}  // namespace mla::cuda
