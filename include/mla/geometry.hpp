#pragma once

#include <cstdint>

#include "mla/device.hpp"
#include "mla/dtype.hpp"
#include "mla/export.hpp"
#include "mla/tensor_view.hpp"

namespace mla {

// The largest values that the library accepts. A device that cannot reach one of them says in its
// refusal what it can.
inline constexpr int64_t kMaxLatentWidth = 8192;       // kv_lora_rank + qk_rope_head_dim, columns
inline constexpr int64_t kMaxHeads = 1024;             // query heads of one rank
inline constexpr int64_t kMaxRows = int64_t{1} << 20;  // requests of one plan
inline constexpr int64_t kMaxTokens = INT32_MAX;       // query tokens of one plan
inline constexpr int64_t kMaxKeys =
    INT32_MAX - 1023;  // of one request: kernels go by steps of keys
inline constexpr int64_t kMaxListedPages = INT32_MAX;  // page ids listed in one plan
inline constexpr int64_t kMaxPoolPages = INT32_MAX;    // pages of a pool, since ids are int32
inline constexpr int32_t kMaxSplits = 256;             // parts of one row's keys

/// What the attention is over, the same for every layer of a model.
struct Geometry {
  int32_t num_heads = 0;              ///< query heads of this rank, 1 to 1024
  int32_t kv_lora_rank = 0;           ///< columns of ckv, the value width, >= 1
  int32_t qk_rope_head_dim = 0;       ///< columns of kpe, >= 0; rank + rope at most 8192
  int32_t page_size = 0;              ///< tokens of a page, >= 1
  DType dtype = DType::kBFloat16;     ///< of q and out: fp32, bf16 or fp16
  DType kv_dtype = DType::kBFloat16;  ///< of the cache; equal to dtype

  int64_t latent_width() const { return int64_t{kv_lora_rank} + qk_rope_head_dim; }
};

/// Strides of the cache in elements. The last dimension is contiguous.
struct CacheStrides {
  int64_t ckv_page = 0;
  int64_t ckv_row = 0;
  int64_t kpe_page = 0;
  int64_t kpe_row = 0;

  bool operator==(const CacheStrides&) const = default;
};

/// Strides of one layer of a pool, whose rows are [ckv | kpe] without gaps.
inline CacheStrides pool_strides(const Geometry& geometry) {
  const int64_t row = geometry.latent_width();
  const int64_t page = row * geometry.page_size;
  return {.ckv_page = page, .ckv_row = row, .kpe_page = page, .kpe_row = row};
}

/// The two parts of a cache, [num_pages, page_size, kv_lora_rank] and
/// [num_pages, page_size, qk_rope_head_dim]: halves of one pool row or tensors of their own. At
/// rope width 0 kpe is ignored.
struct LatentViews {
  ConstTensor<3> ckv{};
  ConstTensor<3> kpe{};
};

/// The two parts of one pool layer [num_pages, page_size, kv_lora_rank + qk_rope_head_dim].
inline LatentViews split_latent(const ConstTensor<3>& layer, int64_t kv_lora_rank) {
  return {.ckv = columns(layer, 0, kv_lora_rank),
          .kpe = columns(layer, kv_lora_rank, layer.shape[2] - kv_lora_rank)};
}

/// A cache without pages, [batch, max_len, latent]: request b is page b of max_len tokens. Plan
/// with page_size = max_len, kv_indptr = 0..B, kv_indices = 0..B-1.
inline LatentViews split_contiguous(const ConstTensor<3>& cache, int64_t kv_lora_rank) {
  return split_latent(cache, kv_lora_rank);
}

}  // namespace mla
