// Host cost of planning. docs/planner.md has the table and the command.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "mla/attention.hpp"
#include "plan/schedule.hpp"

namespace mla::plan {
namespace {

struct Mix {
  std::vector<int32_t> qo_indptr{0};
  std::vector<int32_t> kv_len{};

  void add(int32_t queries, int32_t keys) {
    qo_indptr.push_back(qo_indptr.back() + queries);
    kv_len.push_back(keys);
  }
};

Mix equal_decode(int64_t rows) {
  Mix mix;
  for (int64_t i = 0; i < rows; ++i) mix.add(1, 4096);
  return mix;
}

/// Four row tiles a request.
Mix equal_verify(int64_t rows) {
  Mix mix;
  for (int64_t i = 0; i < rows; ++i) mix.add(16, 4096);
  return mix;
}

Mix uneven_decode(int64_t rows) {
  Mix mix;
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < rows; ++i) {
    mix.add(1, std::max(1, static_cast<int32_t>(2048 * std::exp(1.2 * normal(random)))));
  }
  return mix;
}

/// One row in 64 is a chunk of 256 new tokens.
Mix prefill_and_decode(int64_t rows) {
  Mix mix = uneven_decode(rows);
  Mix mixed;
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t keys = mix.kv_len[static_cast<size_t>(i)];
    mixed.add(i % 64 == 0 ? 256 : 1, std::max(keys, i % 64 == 0 ? 256 : 1));
  }
  return mixed;
}

void schedule(benchmark::State& state, Mix (*make)(int64_t), SplitPolicy splits) {
  const Mix mix = make(state.range(0));
  const ScheduleInput input{.qo_indptr = mix.qo_indptr,
                            .kv_len = mix.kv_len,
                            .num_heads = 16,
                            .causal = true,
                            .num_workers = static_cast<int32_t>(state.range(1)),
                            .splits = splits};
  const CostModel model{.tile_rows = 64,
                        .block_tokens = 64,
                        .split_align = 1,
                        .tile_ns = 1500,
                        .block_ns = 500,
                        .block_row_ns = 5,
                        .partial_row_ns = 25,
                        .merge_ns = 2500,
                        .shares_keys = true};
  Schedule out;
  for ([[maybe_unused]] auto _ : state) {
    make_schedule(input, model, out);
    benchmark::DoNotOptimize(out.tiles.data());
    benchmark::ClobberMemory();
  }
  state.counters["tiles"] = static_cast<double>(out.tiles.size());
}

void rows_and_workers(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "workers"});
  for (const int64_t rows : {1, 32, 128, 1024, 4096}) {
    for (const int64_t workers : {2, 132}) bench->Args({rows, workers});
  }
}

BENCHMARK_CAPTURE(schedule, equal_decode, &equal_decode, SplitPolicy{})->Apply(rows_and_workers);
BENCHMARK_CAPTURE(schedule, equal_verify, &equal_verify, SplitPolicy{})->Apply(rows_and_workers);
BENCHMARK_CAPTURE(schedule, uneven_decode, &uneven_decode, SplitPolicy{})->Apply(rows_and_workers);
BENCHMARK_CAPTURE(schedule, prefill_and_decode, &prefill_and_decode, SplitPolicy{})
    ->Apply(rows_and_workers);
BENCHMARK_CAPTURE(schedule, uneven_decode_fixed_2048, &uneven_decode,
                  SplitPolicy{.fixed_tokens = 2048})
    ->Apply(rows_and_workers);

constexpr int32_t kRows = 128;
constexpr int32_t kPageSize = 16;

/// PagedAttention::plan with its checks and copies: 128 decode rows that list so many pages in all.
void whole_plan(benchmark::State& state) {
  const auto listed = static_cast<int32_t>(state.range(0));
  const int32_t pages = listed / kRows;
  PagedAttention attention(
      {.geometry = {.num_heads = 16,
                    .kv_lora_rank = 512,
                    .qk_rope_head_dim = 64,
                    .page_size = kPageSize,
                    .dtype = DType::kBFloat16,
                    .kv_dtype = DType::kBFloat16},
       .num_pages = listed,
       .limits = {.max_rows = kRows, .max_tokens = kRows, .max_listed_pages = listed}});
  std::vector<int32_t> qo_indptr(size_t{kRows} + 1);
  std::vector<int32_t> kv_indptr(size_t{kRows} + 1);
  for (int32_t i = 0; i <= kRows; ++i) {
    qo_indptr[static_cast<size_t>(i)] = i;
    kv_indptr[static_cast<size_t>(i)] = i * pages;
  }
  std::vector<int32_t> kv_indices(static_cast<size_t>(listed));
  std::iota(kv_indices.begin(), kv_indices.end(), 0);
  std::shuffle(kv_indices.begin(), kv_indices.end(), std::mt19937(1));
  const std::vector<int32_t> kv_len(kRows, pages * kPageSize);
  const Batch batch{.qo_indptr = qo_indptr,
                    .kv_indptr = kv_indptr,
                    .kv_indices = kv_indices,
                    .kv_len = kv_len,
                    .kv_last_page_len = {}};
  for ([[maybe_unused]] auto _ : state) {
    attention.plan(batch, {.sm_scale = 0.07F});
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * listed);
}

BENCHMARK(whole_plan)->ArgName("pages")->Arg(128)->Arg(10240)->Arg(102400)->Arg(1048576);

}  // namespace
}  // namespace mla::plan
