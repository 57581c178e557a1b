#pragma once

// What comes in: stage 1 packs the queries, stage 2 widens the keys. For attention-inl.hpp.

#include <cstdint>

#include "cpu/rows.hpp"
#include "cpu/tile-inl.hpp"

// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result): see tile-inl.hpp
HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {

// Where the rows of one block of keys lie.
template <class T>
struct Sources {
  const T** ckv;
  const T** kpe;
  int32_t count = 0;

  const T* const* rows(const Chunk& chunk) const { return chunk.of_kpe ? kpe : ckv; }
};

// ---------------------------------------------------------------------------------------------
// 1 pack

template <class T>
HWY_INLINE const T* query_columns(const TileRun<T>& run, int32_t row, const Chunk& chunk) {
  const AttentionParams& params = run.params;
  const RowPlace at = place_of(params, run.tile.request, run.tile.row_begin + row);
  if (chunk.of_kpe) {
    return static_cast<const T*>(params.q_pe) + at.token * params.q_pe_token_stride +
           at.head * params.q_pe_head_stride + chunk.first;
  }
  return static_cast<const T*>(params.q_nope) + at.token * params.q_nope_token_stride +
         at.head * params.q_nope_head_stride + chunk.first;
}

// A chunk of a panel's rows: [row][column] to [column][row], one pair of vectors of columns at a
// time.
template <class T>
HWY_INLINE void pack_panel(const TileRun<T>& run, int32_t panel, const Chunk& chunk) {
  const FloatTag d;
  const auto step = hn::Mul(hn::Iota(IntTag(), 0), hn::Set(IntTag(), kPair));
  const int32_t rows = run.panel_vectors(panel) * kLanes;
  HWY_ALIGN float square[kLanes * kPair];
  for (int32_t first_row = 0; first_row < rows; first_row += kLanes) {
    float* to = run.panel_queries(panel, chunk.index) + first_row;
    for (int32_t column = 0; column < chunk.padded; column += kPair) {
      for (int32_t i = 0; i < kLanes; ++i) {
        const int32_t row = panel * kPanelRows + first_row + i;
        VecPair values{hn::Zero(d), hn::Zero(d)};
        if (row < run.tile.num_rows) {
          values = widen_first(query_columns(run, row, chunk) + column, chunk.width - column);
        }
        store_pair(values, square + i * kPair);
      }
      for (int32_t c = 0; c < kPair; ++c, to += rows) {
        hn::Store(hn::GatherIndex(d, square + c, step), d, to);
      }
    }
  }
}

template <class T>
HWY_INLINE void pack_queries(const TileRun<T>& run) {
  for (int32_t index = 0; index < run.layout.num_chunks; ++index) {
    const Chunk chunk = chunk_of(run, index);
    if (!run.by_dot) {
      for (int32_t panel = 0; panel < run.num_panels; ++panel) pack_panel(run, panel, chunk);
      continue;
    }
    for (int32_t row = 0; row < run.tile.num_rows; ++row) {
      float* to = run.row_query(row) + index * kChunkColumns;
      for (int32_t c = 0; c < chunk.padded; c += kPair) {
        store_pair(widen_first(query_columns(run, row, chunk) + c, chunk.width - c), to + c);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// 2 widen

// Follows the page table for the keys of one block. Pages past the tile's last key are not looked
// up.
template <class T>
HWY_INLINE void locate_keys(const TileRun<T>& run, int64_t begin, int64_t end,
                            Sources<T>& sources) {
  const AttentionParams& params = run.params;
  const int64_t count = end - begin;
  sources.count = count < run.layout.block_tokens ? static_cast<int32_t>(count < 0 ? 0 : count)
                                                  : run.layout.block_tokens;
  if (sources.count == 0) return;
  const int64_t page_size = params.geometry.page_size;
  const int32_t* page = params.kv_indices + params.kv_indptr[run.tile.request] + begin / page_size;
  int64_t slot = begin % page_size;
  const T* ckv = static_cast<const T*>(params.ckv);
  const T* kpe = static_cast<const T*>(params.kpe);
  for (int32_t k = 0; k < sources.count; ++k) {
    sources.ckv[k] = ckv + *page * params.cache.ckv_page + slot * params.cache.ckv_row;
    if (run.rope() > 0) {
      sources.kpe[k] = kpe + *page * params.cache.kpe_page + slot * params.cache.kpe_row;
    }
    if (++slot == page_size) {
      slot = 0;
      ++page;
    }
  }
}

// All kChunkColumns of a row.
template <class T>
HWY_INLINE void widen_whole(const T* from, float* to) {
  HWY_UNROLL(4)
  for (int32_t c = 0; c < kChunkColumns; c += kPair) store_pair(widen(from + c), to + c);
}

// A chunk of keys [key, key_end).
template <class T>
HWY_INLINE void widen_keys(const TileRun<T>& run, const Sources<T>& sources, const Chunk& chunk,
                           int32_t key, int32_t key_end) {
  const T* const* rows = sources.rows(chunk) + key;
  float* to = run.chunk_keys(chunk.index) + key * kChunkColumns;
  for (int32_t k = key; k < key_end; ++k, ++rows, to += kChunkColumns) {
    const T* from = *rows + chunk.first;
    if (chunk.width == kChunkColumns) {
      widen_whole(from, to);
      continue;
    }
    for (int32_t c = 0; c < chunk.padded; c += kPair) {
      store_pair(widen_first(from + c, chunk.width - c), to + c);
    }
  }
}

// Zeros for the keys that fill up the last group of a register tile. Their scores are never read,
// but what lies there may be slow to multiply (subnormal numbers).
template <class T>
HWY_INLINE void clear_keys(const TileRun<T>& run, int32_t key, int32_t key_end) {
  const FloatTag d;
  for (int32_t index = 0; index < run.layout.num_chunks; ++index) {
    float* to = run.chunk_keys(index) + key * kChunkColumns;
    for (int32_t i = 0; i < (key_end - key) * kChunkColumns; i += kLanes) {
      hn::Store(hn::Zero(d), d, to + i);
    }
  }
}

template <class T>
HWY_INLINE void prefetch_key(const Sources<T>& next, const Chunk& chunk, int32_t key) {
  constexpr int32_t kLine = 64 / static_cast<int32_t>(sizeof(T));
  const T* from = next.rows(chunk)[key] + chunk.first;
  for (int32_t c = 0; c < chunk.width; c += kLine) {
    __builtin_prefetch(from + c, 0, 2);  // to the level-2 cache
  }
}

// What goes on beside the multiplications of a chunk, spread evenly over their steps: its successor
// is widened, and the same chunk of the next block comes nearer. In one go, the first would wait
// for the level-2 cache and the second fill the line buffers.
template <class T>
struct Beside {
  const TileRun<T>& run;
  const Sources<T>& block;
  const Sources<T>& next;
  const Chunk& chunk;
  const Chunk* successor;  // null: none, or not a whole chunk
  int32_t num_steps;
  int32_t credit = 0;  // keys x num_steps
  int32_t key = 0;

  HWY_INLINE void step() {
    for (credit += block.count; credit >= num_steps; credit -= num_steps) do_key();
  }
  HWY_INLINE void finish() {
    while (key < block.count) do_key();
  }
  HWY_INLINE void do_key() {
    if (successor != nullptr) {
      widen_whole(block.rows(*successor)[key] + successor->first,
                  run.chunk_keys(successor->index) + key * kChunkColumns);
    }
    if (key < next.count) prefetch_key(next, chunk, key);
    ++key;
  }
};

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
