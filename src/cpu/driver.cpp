#include "cpu/driver.hpp"

#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/rows.hpp"

namespace mla::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Weighs the partial results of one row into partial 0: with w_i = exp(lse_i - max),
// out = sum w_i out_i / sum w_i. Returns the LSE of the whole row.
float merge_partials(float* out, const float* lse, int32_t num_partials, int64_t row_stride,
                     int64_t rank) {
  const auto lse_of = [&](int32_t i) { return lse[i * row_stride]; };
  float largest = -kInfinity;
  for (int32_t i = 0; i < num_partials; ++i) largest = std::max(largest, lse_of(i));
  if (largest == -kInfinity) return largest;  // no part saw a key: partial 0 is zero already
  float sum = 0;
  for (int32_t i = 0; i < num_partials; ++i) sum += std::exp(lse_of(i) - largest);
  for (int32_t i = 0; i < num_partials; ++i) {
    const float weight = std::exp(lse_of(i) - largest) / sum;
    const float* part = out + i * row_stride * rank;
    for (int64_t c = 0; c < rank; ++c) {
      const float term = weight == 0 ? 0.0F : weight * part[c];
      out[c] = i == 0 ? term : out[c] + term;
    }
  }
  return largest + std::log(sum);
}

void run_merge(const AttentionParams& params, const plan::Merge& merge, int32_t first,
               int32_t last) {
  const int64_t rank = params.geometry.kv_lora_rank;
  for (int32_t i = first; i < last; ++i) {
    const int64_t at = merge.partial_begin + i;
    float* out = params.partial_out + at * rank;
    const float lse =
        merge_partials(out, params.partial_lse + at, merge.num_partials, merge.num_rows, rank);
    write_row(params, merge.request, merge.row_begin + i, out, lse);
  }
}

}  // namespace

void run_schedule(const AttentionImpl& impl, const AttentionParams& params,
                  const plan::Schedule& schedule, int32_t num_requests, std::byte* worker_memory,
                  size_t worker_stride, Executor& executor) {
  executor.run([&](int worker) {
    std::byte* memory = worker_memory + static_cast<size_t>(worker) * worker_stride;
    for (int32_t t = schedule.worker_indptr[worker]; t < schedule.worker_indptr[worker + 1]; ++t) {
      const plan::Tile& tile = schedule.tiles[t];
      if (tile.request < num_requests) impl.run_tile(params, tile, memory);
    }
  });
  if (schedule.merges.empty()) return;
  const int num_threads = executor.num_threads();
  executor.run([&](int worker) {  // every worker a slice of each merge's rows
    for (const plan::Merge& merge : schedule.merges) {
      const auto slice = [&](int64_t part) {
        return static_cast<int32_t>(merge.num_rows * part / num_threads);
      };
      run_merge(params, merge, slice(worker), slice(worker + 1));
    }
  });
}

}  // namespace mla::cpu
