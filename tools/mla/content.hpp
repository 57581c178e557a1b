#pragma once

#include <cstdint>

#include "mla/dtype.hpp"

namespace mla::cli {

/// Where the numbers of a replay come from: every latent row and query is a function of the seed,
/// the layer, the content and the position, so equal prefixes have equal bytes and any row can be
/// computed again at any time. Values are uniform in [-1, 1), rounded to the dtype.
class Content {
 public:
  Content(uint64_t seed, DType dtype, int64_t latent_width, int64_t num_heads)
      : seed_(seed), dtype_(dtype), latent_width_(latent_width), num_heads_(num_heads) {}

  int64_t latent_row_bytes() const { return latent_width_ * size_of(dtype_); }
  int64_t query_bytes() const { return num_heads_ * latent_row_bytes(); }

  /// The keys of a token's rows: cases::fill_uniform() draws them from these.
  uint64_t latent_key(uint64_t content, int64_t position, int32_t layer) const;
  uint64_t query_key(uint64_t content, int64_t position, int32_t layer) const;

  /// What the cache holds for a token of this content: [ckv | kpe], `out` [latent_width].
  void latent_row(uint64_t content, int64_t position, int32_t layer, void* out) const;
  /// What it asks: [q_nope | q_pe] of each head, `out` [num_heads, latent_width].
  void query(uint64_t content, int64_t position, int32_t layer, void* out) const;

 private:
  uint64_t seed_;
  DType dtype_;
  int64_t latent_width_;
  int64_t num_heads_;
};

}  // namespace mla::cli
