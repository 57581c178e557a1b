#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numbers>

#include "core/attention_impl.hpp"
#include "mla/dtype.hpp"

// Where the rows of a tile lie in the caller's tensors.
namespace mla::cpu {

/// Query token (of the whole batch) and head of row `row` of a request.
struct RowPlace {
  int64_t token;
  int64_t head;
};

inline RowPlace place_of(const AttentionParams& params, int32_t request, int64_t row) {
  const int64_t heads = params.geometry.num_heads;
  return {params.qo_indptr[request] + row / heads, row % heads};
}

/// Keys 0 .. visible - 1 of the request are what query `query` of it may see.
inline int64_t visible_keys(const AttentionParams& params, int32_t request, int64_t query) {
  const int64_t num_keys = params.kv_len[request];
  if (!params.causal) return num_keys;
  const int64_t num_queries = params.qo_indptr[request + 1] - params.qo_indptr[request];
  const int64_t visible = num_keys - num_queries + query + 1;
  return visible < 0 ? 0 : visible;
}

/// Row `token` of a request's keys, as page and slot: element offset with these strides.
inline int64_t key_offset(const AttentionParams& params, int32_t request, int64_t token,
                          int64_t page_stride, int64_t row_stride) {
  const int64_t page_size = params.geometry.page_size;
  const int64_t page = params.kv_indices[params.kv_indptr[request] + token / page_size];
  return page * page_stride + (token % page_size) * row_stride;
}

inline void* out_row(const AttentionParams& params, RowPlace at) {
  const int64_t offset = at.token * params.out_token_stride + at.head * params.out_head_stride;
  return static_cast<std::byte*>(params.out) + offset * size_of(params.geometry.dtype);
}

template <class T>
void write_row_as(const AttentionParams& params, RowPlace at, const float* values) {
  T* out = static_cast<T*>(out_row(params, at));
  for (int64_t c = 0; c < params.geometry.kv_lora_rank; ++c) out[c] = T(values[c]);
}

inline void write_lse(const AttentionParams& params, RowPlace at, float natural_lse) {
  if (params.lse == nullptr) return;
  params.lse[at.token * params.lse_token_stride + at.head * params.lse_head_stride] =
      params.lse_base == LseBase::kTwo ? natural_lse * std::numbers::log2e_v<float> : natural_lse;
}

/// Stores the finished result of one row, rounded to the output's dtype.
inline void write_row(const AttentionParams& params, int32_t request, int64_t row,
                      const float* values, float natural_lse) {
  const RowPlace at = place_of(params, request, row);
  switch (params.geometry.dtype) {
    case DType::kBFloat16:
      write_row_as<BFloat16>(params, at, values);
      break;
    case DType::kFloat16:
      write_row_as<Float16>(params, at, values);
      break;
    default:
      write_row_as<float>(params, at, values);
      break;
  }
  write_lse(params, at, natural_lse);
}

/// Stores the result of a tile's row where the plan wants it: the output or the partial results.
inline void store_row(const AttentionParams& params, const plan::Tile& tile, int32_t row_in_tile,
                      const float* values, float natural_lse) {
  if (tile.partial_begin < 0) {
    write_row(params, tile.request, tile.row_begin + row_in_tile, values, natural_lse);
    return;
  }
  const int64_t rank = params.geometry.kv_lora_rank;
  const int64_t at = tile.partial_begin + row_in_tile;
  std::memcpy(params.partial_out + at * rank, values, static_cast<size_t>(rank) * sizeof(float));
  params.partial_lse[at] = natural_lse;
}

}  // namespace mla::cpu
