#pragma once

// The fast CPU kernel, in portable SIMD. Each source file attention_ISA.cpp sets the target of
// Highway and includes this file, by simd_impl-inl.hpp, so that every instruction set has its own
// copy in a namespace of its own; nothing else is compiled for more than the baseline. Schedule and
// measurements: docs/kernels/cpu.md.
//
// One call computes one tile: up to tile_rows rows of a request against a range of its keys, in
// fp32. Rows lie along the vector lanes, so that no step crosses lanes:
//   1 pack      queries to fp32, columns outside, rows inside (load-inl.hpp)
//   for each block of keys
//     2 widen     a chunk of columns of all keys to fp32 (load-inl.hpp)
//     3 score     and multiply it with the same columns of the queries: scores[key][row]
//     4 weigh     running maximum, weights exp(score - maximum), down the keys
//     5 accumulate  out[row][column] = out * rescale + weights x values (values-inl.hpp)
//     6 fold      now and then, into the total: sums of many equal terms stay exact
//   7 write     out / sum and LSE (values-inl.hpp)
// A tile of few rows (at most half a vector) would leave most lanes idle in 3; its scores are dot
// products along the columns instead.

#include <cstddef>
#include <cstdint>

#include "core/attention_impl.hpp"
#include "cpu/load-inl.hpp"
#include "cpu/score-inl.hpp"
#include "cpu/tile-inl.hpp"
#include "cpu/tile_layout.hpp"
#include "cpu/values-inl.hpp"
#include "cpu/vectors-inl.hpp"
#include "cpu/weigh-inl.hpp"
#include "mla/dtype.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {

template <class T>
void run_tile_as(const AttentionParams& params, const plan::Tile& tile, std::byte* memory) {
  TileRun<T> run = make_run<T>(params, tile, memory);
  start_rows(run);
  pack_queries(run);
  const int32_t block_tokens = run.layout.block_tokens;
  auto** pointers = reinterpret_cast<const T**>(memory + run.layout.sources_at);
  Sources<T> block{pointers, pointers + block_tokens};
  Sources<T> next{pointers + 2 * block_tokens, pointers + 3 * block_tokens};
  const int64_t end = run.ends[tile.num_rows - 1];  // the last row sees the most
  bool first_fold = true;
  int32_t blocks_since_fold = 0;
  locate_keys(run, tile.kv_begin, end, block);
  for (int64_t begin = tile.kv_begin; begin < end; begin += block_tokens) {
    locate_keys(run, begin + block_tokens, end, next);
    if (run.by_dot) {
      score_by_dot(run, block, next);
    } else {
      score_by_rows(run, block, next, begin);
    }
    for (int32_t panel = 0; panel < run.num_panels; ++panel) {
      const int32_t num_keys = panel_keys(run, panel, begin, block.count);
      if (num_keys > 0) weigh_block(run, panel, begin, num_keys);
    }
    accumulate_block(run, begin, block.count);
    if (++blocks_since_fold == kFoldBlocks) {
      fold(run, first_fold);
      first_fold = false;
      blocks_since_fold = 0;
    }
    const Sources<T> done = block;
    block = next;
    next = done;
  }
  if (first_fold || blocks_since_fold > 0) fold(run, first_fold);
  write_rows(run);
}

void run_tile(const AttentionParams& params, const plan::Tile& tile, std::byte* memory) {
  switch (params.geometry.dtype) {
    case DType::kBFloat16:
      return run_tile_as<BFloat16>(params, tile, memory);
    case DType::kFloat16:
      return run_tile_as<Float16>(params, tile, memory);
    default:
      return run_tile_as<float>(params, tile, memory);
  }
}

size_t worker_bytes(const Geometry& geometry) { return tile_layout(geometry, kLanes).bytes; }

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
