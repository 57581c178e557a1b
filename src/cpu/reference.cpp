#include "cpu/reference.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpu/rows.hpp"

namespace mla {
namespace cpu {
namespace {

// Sums and maxima go round so many places, so that none waits for the one before it.
constexpr int64_t kPlaces = 32;

template <class T>
double dot(const void* a, int64_t a_offset, const void* b, int64_t b_offset, int64_t count) {
  const T* x = static_cast<const T*>(a) + a_offset;
  const T* y = static_cast<const T*>(b) + b_offset;
  const auto product = [&](int64_t c) {
    return static_cast<double>(static_cast<float>(x[c])) * static_cast<float>(y[c]);
  };
  std::array<double, kPlaces> sums{};
  const int64_t whole = count / kPlaces * kPlaces;
  for (int64_t c = 0; c < whole; c += kPlaces) {
    for (int64_t i = 0; i < kPlaces; ++i) sums[i] += product(c + i);
  }
  double sum = 0;
  for (int64_t c = whole; c < count; ++c) sum += product(c);
  return std::accumulate(sums.begin(), sums.end(), sum);
}

/// The largest absolute value; NaNs count as nothing.
template <class T>
float max_abs(const T* values, int64_t count) {
  const auto larger = [&](float largest, int64_t c) {
    const float value = std::abs(static_cast<float>(values[c]));
    return largest < value ? value : largest;
  };
  std::array<float, kPlaces> largest{};
  const int64_t whole = count / kPlaces * kPlaces;
  for (int64_t c = 0; c < whole; c += kPlaces) {
    for (int64_t i = 0; i < kPlaces; ++i) largest[i] = larger(largest[i], c + i);
  }
  for (int64_t c = whole; c < count; ++c) largest[0] = larger(largest[0], c);
  return *std::ranges::max_element(largest);
}

// Softmax over the keys seen so far, rescaled whenever a larger score comes.
template <class T>
ReferenceRow attend(const AttentionParams& params, int32_t request, int64_t row, int64_t kv_begin,
                    int64_t kv_end, double* out) {
  const RowPlace at = place_of(params, request, row);
  const int64_t rank = params.geometry.kv_lora_rank;
  const int64_t rope = params.geometry.qk_rope_head_dim;
  const int64_t end =
      std::min(kv_end, visible_keys(params, request, row / params.geometry.num_heads));
  std::fill_n(out, rank, 0.0);
  ReferenceRow result{.lse = -std::numeric_limits<double>::infinity()};
  double sum = 0;
  double largest = result.lse;
  for (int64_t key = kv_begin; key < end; ++key) {
    const int64_t ckv_at =
        key_offset(params, request, key, params.cache.ckv_page, params.cache.ckv_row);
    double score = dot<T>(
        params.q_nope, at.token * params.q_nope_token_stride + at.head * params.q_nope_head_stride,
        params.ckv, ckv_at, rank);
    if (rope > 0) {
      score += dot<T>(
          params.q_pe, at.token * params.q_pe_token_stride + at.head * params.q_pe_head_stride,
          params.kpe, key_offset(params, request, key, params.cache.kpe_page, params.cache.kpe_row),
          rope);
    }
    score *= static_cast<double>(params.sm_scale);
    if (score > largest) {
      const double shrink = std::exp(largest - score);
      for (int64_t c = 0; c < rank; ++c) out[c] *= shrink;
      sum *= shrink;
      largest = score;
    }
    const double weight = std::exp(score - largest);
    const T* value = static_cast<const T*>(params.ckv) + ckv_at;
    for (int64_t c = 0; c < rank; ++c) out[c] += weight * static_cast<float>(value[c]);
    sum += weight;
    result.max_abs_ckv = std::max<double>(result.max_abs_ckv, max_abs(value, rank));
    result.max_abs_score = std::max(result.max_abs_score, std::abs(score));
  }
  if (end <= kv_begin) return result;
  for (int64_t c = 0; c < rank; ++c) out[c] /= sum;
  result.lse = largest + std::log(sum);
  return result;
}

const char* accept(const KernelQuery&) { return nullptr; }

// One row a tile. A double multiply-add in plain loops takes about 0.3 ns.
plan::CostModel cost_model(const KernelQuery& query) {
  const Geometry& geometry = query.geometry;
  return {.tile_rows = 1,
          .block_tokens = 16,
          .split_align = 1,
          .tile_ns = 200,
          .block_ns = 0,
          .block_row_ns = 10.0 * static_cast<double>(geometry.latent_width()),
          .partial_row_ns = 4.0 * static_cast<double>(geometry.kv_lora_rank)};
}

struct Memory {
  double out[kMaxLatentWidth];
  float values[kMaxLatentWidth];
};

size_t worker_bytes(const Geometry&) { return sizeof(Memory); }

void run_tile(const AttentionParams& params, const plan::Tile& tile, std::byte* bytes) {
  auto& memory = *new (bytes) Memory;
  for (int32_t i = 0; i < tile.num_rows; ++i) {
    const ReferenceRow row = reference_row(params, tile.request, tile.row_begin + i, tile.kv_begin,
                                           tile.kv_end, memory.out);
    for (int64_t c = 0; c < params.geometry.kv_lora_rank; ++c) {
      memory.values[c] = static_cast<float>(memory.out[c]);
    }
    store_row(params, tile, i, memory.values, static_cast<float>(row.lse));
  }
}

}  // namespace

ReferenceRow reference_row(const AttentionParams& params, int32_t request, int64_t row,
                           int64_t kv_begin, int64_t kv_end, double* out) {
  switch (params.geometry.dtype) {
    case DType::kBFloat16:
      return attend<BFloat16>(params, request, row, kv_begin, kv_end, out);
    case DType::kFloat16:
      return attend<Float16>(params, request, row, kv_begin, kv_end, out);
    default:
      return attend<float>(params, request, row, kv_begin, kv_end, out);
  }
}

const AttentionImpl kReferenceImpl = {.name = "reference",
                                      .capturable = false,
                                      .refuses = &accept,
                                      .cost_model = &cost_model,
                                      .worker_bytes = &worker_bytes,
                                      .run_tile = &run_tile};

}  // namespace cpu

ReferenceRow reference_row(const Geometry& geometry, const Batch& batch, float sm_scale,
                           bool causal, const ConstTensor<3>& q_nope, const ConstTensor<3>& q_pe,
                           const LatentViews& cache, int64_t token, int64_t head,
                           std::span<double> out) {
  const auto next = std::upper_bound(batch.qo_indptr.begin(), batch.qo_indptr.end(), token);
  const auto request = static_cast<int32_t>(next - batch.qo_indptr.begin() - 1);
  int32_t num_keys = 0;
  if (!batch.kv_len.empty()) {
    num_keys = batch.kv_len[request];
  } else if (const int32_t pages = batch.kv_indptr[request + 1] - batch.kv_indptr[request];
             pages > 0) {
    num_keys = (pages - 1) * geometry.page_size + batch.kv_last_page_len[request];
  }
  // A batch of this request alone, so that lengths need not be gathered for the others.
  const std::array<int32_t, 2> qo_indptr = {batch.qo_indptr[request], batch.qo_indptr[request + 1]};
  const AttentionParams params{.geometry = geometry,
                               .q_nope = q_nope.data,
                               .q_pe = q_pe.data,
                               .ckv = cache.ckv.data,
                               .kpe = cache.kpe.data,
                               .q_nope_token_stride = q_nope.stride[0],
                               .q_nope_head_stride = q_nope.stride[1],
                               .q_pe_token_stride = q_pe.stride[0],
                               .q_pe_head_stride = q_pe.stride[1],
                               .cache = {.ckv_page = cache.ckv.stride[0],
                                         .ckv_row = cache.ckv.stride[1],
                                         .kpe_page = cache.kpe.stride[0],
                                         .kpe_row = cache.kpe.stride[1]},
                               .qo_indptr = qo_indptr.data(),
                               .kv_indptr = &batch.kv_indptr[request],
                               .kv_indices = batch.kv_indices.data(),
                               .kv_len = &num_keys,
                               .sm_scale = sm_scale,
                               .causal = causal};
  const int64_t row = (token - qo_indptr[0]) * geometry.num_heads + head;
  return cpu::reference_row(params, 0, row, 0, num_keys, out.data());
}

}  // namespace mla
