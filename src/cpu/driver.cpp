#include "cpu/driver.hpp"

#include <cstdint>
#include <span>

#include "cpu/merge_rows.hpp"
#include "cpu/rows.hpp"
#include "mla/executor.hpp"

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

void run_schedule(const AttentionImpl& impl, const AttentionLaunch& launch) {
  const PlanView plan = launch.image.view(launch.plan);
  AttentionParams params = launch.params;
  params.qo_indptr = plan.qo_indptr;
  params.kv_indptr = plan.kv_indptr;
  params.kv_indices = plan.kv_indices;
  params.kv_len = plan.kv_len;
  params.sm_scale = plan.sm_scale;
  params.causal = plan.causal;
  params.lse_base = plan.lse_base;
  Executor& executor = *launch.executor;
  executor.run([&](int worker) {
    std::byte* memory = launch.worker_memory + static_cast<size_t>(worker) * launch.worker_stride;
    for (int32_t t = plan.worker_indptr[worker]; t < plan.worker_indptr[worker + 1]; ++t) {
      const plan::Tile& tile = plan.tiles[t];
      if (tile.request < launch.num_requests) impl.run_tile(params, tile, memory);
    }
  });
  if (plan.num_merges == 0) return;
  const int num_threads = executor.num_threads();
  executor.run([&](int worker) {  // every worker a slice of each merge's rows
    for (const plan::Merge& merge : std::span(plan.merges, static_cast<size_t>(plan.num_merges))) {
      const auto slice = [&](int64_t part) {
        return static_cast<int32_t>(merge.num_rows * part / num_threads);
      };
      run_merge(params, merge, slice(worker), slice(worker + 1));
    }
  });
}

}  // namespace mla::cpu
