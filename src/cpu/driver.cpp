#include "cpu/driver.hpp"

#include <cstdint>

#include "cpu/merge_rows.hpp"
#include "cpu/rows.hpp"

namespace mla::cpu {
namespace {

void run_merge(const AttentionParams& params, const plan::Merge& merge, int32_t first,
               int32_t last) {
  const int64_t rank = params.geometry.kv_lora_rank;
  for (int32_t i = first; i < last; ++i) {
    const auto part = [&](int64_t p) -> PartialRow {
      const int64_t at = merge.partial_begin + p * merge.num_rows + i;
      return {params.partial_out + at * rank, DType::kFloat32, params.partial_lse[at]};
    };
    const RowPlace at = place_of(params, merge.request, merge.row_begin + i);
    const float lse = merge_row(merge.num_partials, part, LseBase::kNatural, rank,
                                params.geometry.dtype, out_row(params, at));
    write_lse(params, at, lse);
  }
}

}  // namespace

void run_schedule(const AttentionImpl& impl, const AttentionParams& params, const PlanView& plan,
                  int32_t num_requests, std::byte* worker_memory, size_t worker_stride,
                  Executor& executor) {
  executor.run([&](int worker) {
    std::byte* memory = worker_memory + static_cast<size_t>(worker) * worker_stride;
    for (int32_t t = plan.worker_indptr[worker]; t < plan.worker_indptr[worker + 1]; ++t) {
      const plan::Tile& tile = plan.tiles[t];
      if (tile.request < num_requests) impl.run_tile(params, tile, memory);
    }
  });
  if (plan.merges.empty()) return;
  const int num_threads = executor.num_threads();
  executor.run([&](int worker) {  // every worker a slice of each merge's rows
    for (const plan::Merge& merge : plan.merges) {
      const auto slice = [&](int64_t part) {
        return static_cast<int32_t>(merge.num_rows * part / num_threads);
      };
      run_merge(params, merge, slice(worker), slice(worker + 1));
    }
  });
}

}  // namespace mla::cpu
