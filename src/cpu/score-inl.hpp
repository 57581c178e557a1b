#pragma once

// Stage 3: scores, in register tiles of keys x rows, or as dot products where a tile has few rows.
// For attention-inl.hpp.

#include <cstdint>

#include "cpu/load-inl.hpp"

// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result): see tile-inl.hpp
HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {

// scores[key][row] (+)= sum over `columns` of keys[key][column] * queries[column][row].
template <int kKeys, int kVectors, class T>
HWY_INLINE void score_tile(const float* HWY_RESTRICT keys, const float* HWY_RESTRICT queries,
                           int32_t columns, Beside<T>& beside, float* HWY_RESTRICT scores,
                           bool first) {
  const FloatTag d;
  Vec acc[kKeys][kVectors];
  HWY_UNROLL(24)
  for (int k = 0; k < kKeys; ++k) {
    HWY_UNROLL(4)
    for (int v = 0; v < kVectors; ++v) acc[k][v] = hn::Zero(d);
  }
  for (int32_t c = 0; c < columns; c += kColumnStep) {
    beside.step();
    HWY_UNROLL(4)
    for (int32_t i = 0; i < kColumnStep; ++i) {
      Vec query[kVectors];
      HWY_UNROLL(4)
      for (int v = 0; v < kVectors; ++v) query[v] = hn::Load(d, queries + v * kLanes);
      queries += kVectors * kLanes;
      HWY_UNROLL(24)
      for (int k = 0; k < kKeys; ++k) {
        const Vec key = hn::Set(d, keys[k * kChunkColumns + c + i]);
        HWY_UNROLL(4)
        for (int v = 0; v < kVectors; ++v) acc[k][v] = hn::MulAdd(key, query[v], acc[k][v]);
      }
    }
  }
  HWY_UNROLL(24)
  for (int k = 0; k < kKeys; ++k) {
    HWY_UNROLL(4)
    for (int v = 0; v < kVectors; ++v) {
      float* to = scores + (k * kVectors + v) * kLanes;
      hn::Store(first ? acc[k][v] : hn::Add(hn::Load(d, to), acc[k][v]), d, to);
    }
  }
}

template <int kKeys, int kVectors, class T>
HWY_INLINE void score_panel(const TileRun<T>& run, Beside<T>& beside, int32_t panel,
                            int32_t num_keys, const Chunk& chunk) {
  const float* queries = run.panel_queries(panel, chunk.index);
  const float* keys = run.chunk_keys(chunk.index);
  const int32_t part = run.part_of(chunk.index);
  const bool first = chunk.index == 0 || run.part_of(chunk.index - 1) != part;
  float* scores = run.panel_scores(panel, part);
  for (int32_t k = 0; k < num_keys; k += kKeys) {
    score_tile<kKeys, kVectors>(keys + k * kChunkColumns, queries, chunk.padded, beside,
                                scores + k * kVectors * kLanes, first);
  }
}

// Keys of the block that the panel's last row sees: a prefix.
template <class T>
HWY_INLINE int32_t panel_keys(const TileRun<T>& run, int32_t panel, int64_t begin, int32_t count) {
  const int64_t seen = run.ends[run.panel_last_row(panel)] - begin;
  return static_cast<int32_t>(seen < 0 ? 0 : (seen < count ? seen : count));
}

// Register tiles of a block, of one chunk.
template <class T>
HWY_INLINE int32_t count_tiles(const TileRun<T>& run, int64_t begin, int32_t count) {
  int32_t tiles = 0;
  for (int32_t panel = 0; panel < run.num_panels; ++panel) {
    const int32_t keys =
        run.panel_vectors(panel) == 2 ? RegisterTile::kWideKeys : RegisterTile::kNarrowKeys;
    tiles += (panel_keys(run, panel, begin, count) + keys - 1) / keys;
  }
  return tiles;
}

template <class T>
HWY_INLINE void score_by_rows(const TileRun<T>& run, const Sources<T>& block,
                              const Sources<T>& next, int64_t begin) {
  constexpr int32_t kPad = RegisterTile::kNarrowKeys;
  static_assert(kPad % RegisterTile::kWideKeys == 0);
  clear_keys(run, block.count, (block.count + kPad - 1) / kPad * kPad);
  const int32_t num_tiles = count_tiles(run, begin, block.count);
  Chunk chunk = chunk_of(run, 0);
  widen_keys(run, block, chunk, 0, block.count);
  for (int32_t index = 0; index < run.layout.num_chunks; ++index) {
    const bool last = index + 1 == run.layout.num_chunks;
    const Chunk successor = last ? chunk : chunk_of(run, index + 1);
    const bool beside_it = !last && successor.width == kChunkColumns;
    Beside<T> beside{run,
                     block,
                     next,
                     chunk,
                     beside_it ? &successor : nullptr,
                     num_tiles * chunk.padded / kColumnStep};
    for (int32_t panel = 0; panel < run.num_panels; ++panel) {
      const int32_t num_keys = panel_keys(run, panel, begin, block.count);
      if (run.panel_vectors(panel) == 2) {
        score_panel<RegisterTile::kWideKeys, 2>(run, beside, panel, num_keys, chunk);
      } else {
        score_panel<RegisterTile::kNarrowKeys, 1>(run, beside, panel, num_keys, chunk);
      }
    }
    beside.finish();
    if (!last && !beside_it) widen_keys(run, block, successor, 0, block.count);
    chunk = successor;
  }
}

// scores[key][row] of kRows rows and kKeys keys as dot products along the columns.
template <int kRows, int kKeys, class T>
HWY_INLINE void dot_tile(const TileRun<T>& run, int32_t row, int32_t key) {
  const FloatTag d;
  Vec total[kRows][kKeys];
  Vec acc[kRows][kKeys];
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (int k = 0; k < kKeys; ++k) total[r][k] = acc[r][k] = hn::Zero(d);
  }
  const int64_t query_stride = int64_t{run.layout.num_chunks} * kChunkColumns;
  for (int32_t index = 0; index < run.layout.num_chunks; ++index) {
    const float* HWY_RESTRICT queries = run.row_query(row) + index * kChunkColumns;
    const float* HWY_RESTRICT keys = run.chunk_keys(index) + key * kChunkColumns;
    const int32_t columns = chunk_of(run, index).padded;
    for (int32_t c = 0; c < columns; c += kLanes) {
      Vec query[kRows];
      HWY_UNROLL(4)
      for (int r = 0; r < kRows; ++r) query[r] = hn::Load(d, queries + r * query_stride + c);
      HWY_UNROLL(4)
      for (int k = 0; k < kKeys; ++k) {
        const Vec values = hn::Load(d, keys + k * kChunkColumns + c);
        HWY_UNROLL(4)
        for (int r = 0; r < kRows; ++r) acc[r][k] = hn::MulAdd(values, query[r], acc[r][k]);
      }
    }
    if (index + 1 < run.layout.num_chunks && run.part_of(index + 1) == run.part_of(index)) continue;
    HWY_UNROLL(4)
    for (int r = 0; r < kRows; ++r) {
      HWY_UNROLL(4)
      for (int k = 0; k < kKeys; ++k) {
        total[r][k] = hn::Add(total[r][k], acc[r][k]);
        acc[r][k] = hn::Zero(d);
      }
    }
  }
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (int k = 0; k < kKeys; ++k) {
      run.scores[(key + k) * kLanes + row + r] = hn::GetLane(hn::SumOfLanes(d, total[r][k]));
    }
  }
}

template <class T>
HWY_INLINE void score_by_dot(const TileRun<T>& run, const Sources<T>& block,
                             const Sources<T>& next) {
  constexpr int kKeys = RegisterTile::kDotKeys;
  for (int32_t k = 0; k < block.count; k += kKeys) {
    const int32_t key_end = k + kKeys < block.count ? k + kKeys : block.count;
    clear_keys(run, key_end, k + kKeys);
    for (int32_t index = 0; index < run.layout.num_chunks; ++index) {
      const Chunk chunk = chunk_of(run, index);
      widen_keys(run, block, chunk, k, key_end);
      for (int32_t i = k; i < k + kKeys && i < next.count; ++i) prefetch_key(next, chunk, i);
    }
    int32_t row = 0;
    constexpr int kRows = RegisterTile::kDotRows;
    for (; row + kRows <= run.tile.num_rows; row += kRows) dot_tile<kRows, kKeys>(run, row, k);
    for (; row < run.tile.num_rows; ++row) dot_tile<1, kKeys>(run, row, k);
  }
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
