#pragma once

// The tile at work: where its parts lie in the worker's memory, its rows and its chunks of columns.
// For attention-inl.hpp.

#include <cstdint>
#include <limits>

#include "core/attention_impl.hpp"
#include "cpu/rows.hpp"
#include "cpu/tile_layout.hpp"
#include "cpu/vectors-inl.hpp"

// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result): int32 products are offsets
// within a worker's memory, at most 2 MiB; offsets into tensors and the pool are int64 from the
// start.
HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {

// Register tiles, by the number of vector registers.
struct RegisterTile {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SCALAR
  static constexpr int kRegisters = 16;
#else
  static constexpr int kRegisters = 32;
#endif
  static constexpr bool kMany = kRegisters == 32;
  static constexpr int kWideVectors = 2;               // vectors of rows in a full panel
  static constexpr int kWideKeys = kMany ? 8 : 6;      // scores: keys x 2 vectors of rows,
  static constexpr int kNarrowKeys = kMany ? 24 : 12;  // or keys x 1 vector
  static constexpr int kOutVectors = kMany ? 4 : 2;    // out: 4 rows x vectors of columns
  static constexpr int kDotRows = kMany ? 4 : 2;       // dot products: rows x keys
  static constexpr int kDotKeys = 4;
};
constexpr int32_t kPanelRows = kLanes * RegisterTile::kWideVectors;
constexpr int32_t kColumnStep = 4;  // columns of one step of a score tile
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
struct TileRun {
  const AttentionParams& params;
  const plan::Tile& tile;
  TileLayout layout;
  float* queries;
  float* keys;
  float* scores;
  float* out;
  float* total;
  float* maximum;    // of the scaled scores so far
  float* sum;        // of the weights since the last fold
  float* rescale;    // what the block makes of older sums
  float* total_max;  // the maximum that the total is relative to
  float* total_sum;
  int32_t* ends;  // first key that the row does not see
  int32_t num_panels;
  int32_t num_row_vectors;
  bool by_dot;

  int32_t rope() const { return params.geometry.qk_rope_head_dim; }
  int32_t rank() const { return params.geometry.kv_lora_rank; }
  int32_t panel_vectors(int32_t panel) const {
    const int32_t left = num_row_vectors - panel * RegisterTile::kWideVectors;
    return left < RegisterTile::kWideVectors ? left : RegisterTile::kWideVectors;
  }
  int32_t panel_last_row(int32_t panel) const {
    const int32_t end = (panel + 1) * kPanelRows;
    return (end < tile.num_rows ? end : tile.num_rows) - 1;
  }
  // The products of a chunk are summed in one go, then the sums of a third of the chunks; the parts
  // are added in higher precision (weigh_block). A single sum over 576 columns would be off by
  // several units in the last place of the score. (Dot products add their parts at once: each is
  // a sum over the lanes.)
  int32_t num_parts() const {
    return layout.num_chunks < kScoreParts ? layout.num_chunks : kScoreParts;
  }
  int32_t part_of(int32_t chunk) const { return chunk * num_parts() / layout.num_chunks; }
  float* panel_scores(int32_t panel, int32_t part) const {
    const int64_t rows = int64_t{part} * num_row_vectors * kLanes + panel * kPanelRows;
    return scores + rows * layout.block_tokens;
  }
  float* panel_weights(int32_t panel) const { return panel_scores(panel, 0); }
  float* panel_queries(int32_t panel, int32_t chunk) const {
    const int64_t rows_before = int64_t{panel} * kPanelRows * layout.num_chunks +
                                int64_t{chunk} * panel_vectors(panel) * kLanes;
    return queries + rows_before * kChunkColumns;
  }
  float* row_query(int32_t row) const {
    return queries + int64_t{row} * layout.num_chunks * kChunkColumns;
  }
  float* chunk_keys(int32_t chunk) const {
    return keys + int64_t{chunk} * layout.block_tokens * kChunkColumns;
  }
};

template <class T>
HWY_INLINE TileRun<T> make_run(const AttentionParams& params, const plan::Tile& tile,
                               std::byte* memory) {
  const TileLayout layout = tile_layout(params.geometry, kLanes);
  const auto floats = [memory](size_t at) { return reinterpret_cast<float*>(memory + at); };
  const int32_t vectors = (tile.num_rows + kLanes - 1) / kLanes;
  const int64_t row_lanes = int64_t{vectors} * kLanes;
  float* rows = floats(layout.rows_at);
  return {.params = params,
          .tile = tile,
          .layout = layout,
          .queries = floats(layout.queries_at),
          .keys = floats(layout.keys_at),
          .scores = floats(layout.scores_at),
          .out = floats(layout.out_at),
          .total = floats(layout.total_at),
          .maximum = rows,
          .sum = rows + row_lanes,
          .rescale = rows + 2 * row_lanes,
          .total_max = rows + 3 * row_lanes,
          .total_sum = rows + 4 * row_lanes,
          .ends = reinterpret_cast<int32_t*>(rows + 5 * row_lanes),
          .num_panels = (vectors + RegisterTile::kWideVectors - 1) / RegisterTile::kWideVectors,
          .num_row_vectors = vectors,
          .by_dot = tile.num_rows <= kLanes / 2};
}

// Sets the rows to what they are before the first key, and finds the last key that each may see.
template <class T>
HWY_INLINE void start_rows(TileRun<T>& run) {
  const plan::Tile& tile = run.tile;
  for (int32_t i = 0; i < run.num_row_vectors * kLanes; ++i) {
    const int32_t row = i < tile.num_rows ? i : tile.num_rows - 1;  // lanes of no row follow it
    const int64_t query = (tile.row_begin + row) / run.params.geometry.num_heads;
    const int64_t visible = visible_keys(run.params, tile.request, query);
    run.ends[i] = visible < tile.kv_end ? static_cast<int32_t>(visible) : tile.kv_end;
    run.maximum[i] = -kInfinity;
    run.sum[i] = 0;
  }
  const FloatTag d;
  for (int64_t i = 0; i < int64_t{tile.num_rows} * run.layout.out_stride; i += kLanes) {
    hn::Store(hn::Zero(d), d, run.out + i);
  }
  if (!run.by_dot) return;
  for (int32_t k = 0; k < run.layout.block_tokens; ++k) {  // the lanes of no row
    hn::Store(hn::Zero(d), d, run.scores + k * kLanes);
  }
}

// A chunk of columns: where it lies in ckv or kpe, and how many of it there are.
struct Chunk {
  int32_t index;
  bool of_kpe;
  int32_t first;   // column of ckv or kpe
  int32_t width;   // columns, at most kChunkColumns
  int32_t padded;  // rounded up to whole pairs of vectors
};

template <class T>
HWY_INLINE Chunk chunk_of(const TileRun<T>& run, int32_t index) {
  const bool of_kpe = index >= run.layout.rank_chunks;
  const int32_t first = (of_kpe ? index - run.layout.rank_chunks : index) * kChunkColumns;
  const int32_t left = (of_kpe ? run.rope() : run.rank()) - first;
  const int32_t width = left < kChunkColumns ? left : kChunkColumns;
  constexpr int32_t kUnit = kPair > kColumnStep ? kPair : kColumnStep;
  return {index, of_kpe, first, width, (width + kUnit - 1) / kUnit * kUnit};
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
