#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/attention_impl.hpp"

namespace mla::cpu {

/// One tile of one request, which is the second of its batch. Everything that the tile may not read
/// holds NaN, page numbers that it may not follow are -1 and 2^31 - 1.
struct TileCase {
  Geometry geometry;
  int32_t num_queries = 1;
  int32_t num_keys = 1;
  int64_t row_begin = 0;
  int32_t num_rows = 0;  ///< 0: as many as one tile takes
  int32_t kv_begin = 0;
  int32_t kv_end = -1;  ///< -1: num_keys
  bool causal = true;
  bool partial = false;       ///< into the partial results instead of the output
  bool contiguous = false;    ///< pages in order; else scattered backwards over the pool
  bool equal_heads = false;   ///< every head of a query has the same query row
  float query_scale = 1.0F;   ///< queries are uniform in -scale .. scale
  float sm_scale = 0.07217F;  ///< 192^-0.5
};

/// Tensors for a case: q, cache and out are slices of wider tensors.
class TileProblem {
 public:
  explicit TileProblem(const TileCase& tile_case, const AttentionImpl& impl);

  /// Runs the kernel on poisoned outputs and working memory.
  void run();
  /// Compares each row of the tile with the double reference; empty, or what is wrong first: a row
  /// off by more than the contract allows, a byte written elsewhere.
  std::string check() const;

  const TileCase& tile_case() const { return case_; }
  AttentionParams& params() { return params_; }
  const plan::Tile& tile() const { return tile_; }
  int64_t page_of(int32_t token) const;
  /// Bytes of the cached row (ckv and kpe) of a token.
  std::byte* key_row(int32_t token);
  float out_value(int32_t row_in_tile, int64_t column) const;
  float lse_value(int32_t row_in_tile) const;
  /// Output (or partial) and LSE of every row, as bits.
  std::vector<std::byte> result_bits() const;

 private:
  std::string check_row(int32_t row, double* expected) const;
  std::string check_surroundings() const;

  TileCase case_;
  const AttentionImpl& impl_;
  int64_t element_ = 0;  // bytes
  int64_t row_stride_ = 0, out_stride_ = 0;
  std::vector<int32_t> qo_indptr_, kv_indptr_, kv_indices_, kv_len_;
  std::vector<std::byte> queries_, pool_, out_, memory_;
  std::vector<float> lse_, partial_out_, partial_lse_;
  AttentionParams params_;
  plan::Tile tile_;
};

/// The kernels of this build that this machine can run, the reference left out.
std::vector<const AttentionImpl*> simd_impls();

}  // namespace mla::cpu
