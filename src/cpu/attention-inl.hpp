// The fast CPU kernel, in portable SIMD. Each source file attention_ISA.cpp sets the target of
// Highway and includes this file once, so that every instruction set has its own copy in a
// namespace of its own; nothing else is compiled for more than the baseline. Schedule and
// measurements: docs/kernels/cpu.md.
//
// One call computes one tile: up to tile_rows rows of a request against a range of its keys, in
// fp32. Rows lie along the vector lanes, so that no step crosses lanes:
//   1 pack      queries to fp32, columns outside, rows inside
//   for each block of keys
//     2 widen     a chunk of columns of all keys to fp32
//     3 score     and multiply it with the same columns of the queries: scores[key][row]
//     4 weigh     running maximum, weights exp(score - maximum), down the keys
//     5 accumulate  out[row][column] = out * rescale + weights x values
//     6 fold      now and then, into the total: sums of many equal terms stay exact
//   7 write     out / sum and LSE
// A tile of few rows (at most half a vector) would leave most lanes idle in 3; its scores are dot
// products along the columns instead.

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/attention_impl.hpp"
#include "cpu/rows.hpp"
#include "cpu/tile_layout.hpp"
#include "hwy/highway.h"
#include "mla/dtype.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using IntTag = hn::RebindToSigned<FloatTag>;
using WordTag = hn::RebindToUnsigned<FloatTag>;
using HalfTag = hn::Rebind<uint16_t, FloatTag>;
using Vec = hn::Vec<FloatTag>;

// Register tiles, by the number of vector registers.
struct RegisterTile {
  static constexpr int kWideVectors = 2;                // vectors of rows in a full panel
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SCALAR  // 16 registers
  static constexpr int kWideKeys = 6;                   // keys x 2 vectors
  static constexpr int kNarrowKeys = 12;                // keys x 1 vector
  static constexpr int kOutVectors = 2;                 // 4 rows x vectors of columns
#else                                                   // 32 registers
  static constexpr int kWideKeys = 8;
  static constexpr int kNarrowKeys = 24;
  static constexpr int kOutVectors = 4;
#endif
  static constexpr int kOutRows = 4;
  static constexpr int kDotRows = 4, kDotKeys = 4;
};
constexpr int32_t kLanes = static_cast<int32_t>(hn::MaxLanes(FloatTag()));
constexpr int32_t kPanelRows = kLanes * RegisterTile::kWideVectors;
// Columns whose products are summed in one go: sums of sums keep the rounding error of a score near
// one unit in the last place, and a chunk of keys and queries stays in the level-1 cache.
constexpr int32_t kChunkColumns = 64;
// Blocks between two folds: 32 x 96 terms are summed at most before they join the total.
constexpr int32_t kFoldBlocks = 32;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------------------------------------
// Conversions

HWY_INLINE Vec widen(const float* from) { return hn::LoadU(FloatTag(), from); }

HWY_INLINE Vec widen(const BFloat16* from) {
  const auto bits = hn::LoadU(HalfTag(), reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::PromoteTo(WordTag(), bits)));
}

HWY_INLINE Vec widen(const Float16* from) {
#if HWY_TARGET == HWY_SCALAR  // its conversion turns infinities into numbers
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = static_cast<float>(from[i]);
  return hn::LoadU(FloatTag(), values);
#else
  const hn::Rebind<hwy::float16_t, FloatTag> tag;
  const auto bits = hn::LoadU(HalfTag(), reinterpret_cast<const uint16_t*>(from));
  return hn::PromoteTo(FloatTag(), hn::BitCast(tag, bits));
#endif
}

// The first `count` elements, then zeros; reads no others.
template <class T>
HWY_INLINE Vec widen_first(const T* from, int32_t count) {
  if (count >= kLanes) return widen(from);
  T padded[kLanes] = {};
  for (int32_t i = 0; i < count; ++i) padded[i] = from[i];
  return widen(padded);
}

HWY_INLINE void narrow(Vec value, float* to) { hn::StoreU(value, FloatTag(), to); }

// Highway cuts fp32 to bf16; this rounds to nearest even and keeps NaN.
HWY_INLINE void narrow(Vec value, BFloat16* to) {
  const WordTag words;
  const auto bits = hn::BitCast(words, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1U));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(words, 0x7fffU)), odd);
  const auto quiet = hn::Or(bits, hn::Set(words, 0x00400000U));
  const auto is_nan = hn::RebindMask(words, hn::IsNaN(value));
  const auto upper = hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded));
  hn::StoreU(hn::DemoteTo(HalfTag(), hn::BitCast(IntTag(), upper)), HalfTag(),
             reinterpret_cast<uint16_t*>(to));
}

HWY_INLINE void narrow(Vec value, Float16* to) {
#if HWY_TARGET == HWY_SCALAR  // its conversion truncates
  float values[kLanes];
  hn::StoreU(value, FloatTag(), values);
  for (int i = 0; i < kLanes; ++i) to[i] = Float16(values[i]);
#else
  const hn::Rebind<hwy::float16_t, FloatTag> tag;
  hn::StoreU(hn::BitCast(HalfTag(), hn::DemoteTo(tag, value)), HalfTag(),
             reinterpret_cast<uint16_t*>(to));
#endif
}

// e^x for x <= 0 (or a rounding error above) to 2^-23; 0 below -87, where fp32 has no normal
// numbers left; exactly 1 at 0; NaN stays NaN.
HWY_INLINE Vec exp_negative(Vec x) {
  const FloatTag d;
  const Vec y = hn::Mul(x, hn::Set(d, 1.44269504F));
  const Vec n = hn::Round(y);
  const Vec f = hn::Sub(y, n);  // [-0.5, 0.5]; the polynomial is 2^f to 2e-9, exact at 0
  Vec p = hn::MulAdd(hn::Set(d, 1.5353354683611542e-4F), f, hn::Set(d, 1.339887734502554e-3F));
  p = hn::MulAdd(p, f, hn::Set(d, 9.618437848985195e-3F));
  p = hn::MulAdd(p, f, hn::Set(d, 5.5503323674201965e-2F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.24022647738456726F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.6931471824645996F));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0F));
  const auto exponent = hn::Add(hn::ConvertTo(IntTag(), n), hn::Set(IntTag(), 127));
  const Vec power = hn::BitCast(d, hn::ShiftLeft<23>(exponent));
  return hn::IfThenZeroElse(hn::Lt(y, hn::Set(d, -126.0F)), hn::Mul(p, power));
}

// ---------------------------------------------------------------------------------------------
// The tile at work

// Where the rows of one block of keys lie.
template <class T>
struct Sources {
  const T** ckv;
  const T** kpe;
  int32_t count = 0;
};

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
  float* panel_scores(int32_t panel) const {
    return scores + int64_t{panel} * kPanelRows * layout.block_tokens;
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

// Part of a row's columns: ckv, or kpe after it.
template <class T>
struct Part {
  int32_t begin;   // first column in the padded row
  int32_t padded;  // columns, with padding
  int32_t width;   // and without
};

template <class T>
HWY_INLINE Part<T> part_of(const TileRun<T>& run, int index) {
  const int32_t rank_padded = run.layout.rank_padded;
  if (index == 0) return {0, rank_padded, run.rank()};
  return {rank_padded, run.layout.width_padded - rank_padded, run.rope()};
}

// ---------------------------------------------------------------------------------------------
// 1 pack

template <class T>
HWY_INLINE const T* query_part(const AttentionParams& params, RowPlace at, int part) {
  if (part == 0) {
    return static_cast<const T*>(params.q_nope) + at.token * params.q_nope_token_stride +
           at.head * params.q_nope_head_stride;
  }
  return static_cast<const T*>(params.q_pe) + at.token * params.q_pe_token_stride +
         at.head * params.q_pe_head_stride;
}

// One vector of columns of a panel's rows: [row][column] to [column][row].
template <class T>
HWY_INLINE void pack_columns(const TileRun<T>& run, int32_t panel, int part, int32_t column) {
  const FloatTag d;
  const Part<T> columns = part_of(run, part);
  const int32_t vectors = run.panel_vectors(panel);
  HWY_ALIGN float square[kPanelRows * kLanes];
  for (int32_t i = 0; i < vectors * kLanes; ++i) {
    const int32_t row = panel * kPanelRows + i;
    Vec value = hn::Zero(d);
    if (row < run.tile.num_rows) {
      const RowPlace at = place_of(run.params, run.tile.request, run.tile.row_begin + row);
      value = widen_first(query_part<T>(run.params, at, part) + column, columns.width - column);
    }
    hn::Store(value, d, square + i * kLanes);
  }
  float* to = run.queries + int64_t{panel} * kPanelRows * run.layout.width_padded +
              int64_t{columns.begin + column} * vectors * kLanes;
  const auto step = hn::Mul(hn::Iota(IntTag(), 0), hn::Set(IntTag(), kLanes));
  for (int32_t c = 0; c < kLanes; ++c) {
    for (int32_t v = 0; v < vectors; ++v, to += kLanes) {
      hn::Store(hn::GatherIndex(d, square + v * kLanes * kLanes + c, step), d, to);
    }
  }
}

template <class T>
HWY_INLINE void pack_queries(const TileRun<T>& run) {
  for (int part = 0; part < 2; ++part) {
    const Part<T> columns = part_of(run, part);
    for (int32_t c = 0; c < columns.padded; c += kLanes) {
      if (!run.by_dot) {
        for (int32_t panel = 0; panel < run.num_panels; ++panel) pack_columns(run, panel, part, c);
        continue;
      }
      for (int32_t row = 0; row < run.tile.num_rows; ++row) {
        const RowPlace at = place_of(run.params, run.tile.request, run.tile.row_begin + row);
        const Vec value = widen_first(query_part<T>(run.params, at, part) + c, columns.width - c);
        hn::Store(value, FloatTag(),
                  run.queries + int64_t{row} * run.layout.width_padded + columns.begin + c);
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

// Columns [first, last) of a part of keys [key, key_end), then zero rows up to key_padded.
template <class T>
HWY_INLINE void widen_keys(const TileRun<T>& run, const Sources<T>& sources, int part,
                           int32_t first, int32_t last, int32_t key, int32_t key_end,
                           int32_t key_padded) {
  const FloatTag d;
  const Part<T> columns = part_of(run, part);
  const T* const* rows = part == 0 ? sources.ckv : sources.kpe;
  for (int32_t k = key; k < key_padded; ++k) {
    float* to = run.keys + int64_t{k} * run.layout.key_stride + columns.begin;
    for (int32_t c = first; c < last; c += kLanes) {
      hn::Store(k < key_end ? widen_first(rows[k] + c, columns.width - c) : hn::Zero(d), d, to + c);
    }
  }
}

template <class T>
HWY_INLINE void prefetch_columns(const Sources<T>& next, int part, int32_t first, int32_t last,
                                 int32_t key) {
  if (key >= next.count) return;
  const T* row = part == 0 ? next.ckv[key] : next.kpe[key];
  constexpr int32_t kLine = 64 / static_cast<int32_t>(sizeof(T));
  for (int32_t c = first; c < last; c += kLine) {
    __builtin_prefetch(row + c, 0, 2);  // to the level-2 cache
  }
}

// ---------------------------------------------------------------------------------------------
// 3 score

// scores[key][row] (+)= sum over `columns` of keys[key][column] * queries[column][row].
template <int kKeys, int kVectors>
HWY_INLINE void score_tile(const float* HWY_RESTRICT keys, int64_t key_stride,
                           const float* HWY_RESTRICT queries, int32_t columns,
                           float* HWY_RESTRICT scores, bool first) {
  const FloatTag d;
  Vec acc[kKeys][kVectors];
  HWY_UNROLL(24)
  for (int k = 0; k < kKeys; ++k) {
    HWY_UNROLL(4)
    for (int v = 0; v < kVectors; ++v) acc[k][v] = hn::Zero(d);
  }
  for (int32_t c = 0; c < columns; ++c) {
    Vec query[kVectors];
    HWY_UNROLL(4)
    for (int v = 0; v < kVectors; ++v) query[v] = hn::Load(d, queries + v * kLanes);
    queries += kVectors * kLanes;
    HWY_UNROLL(24)
    for (int k = 0; k < kKeys; ++k) {
      const Vec key = hn::Set(d, keys[k * key_stride + c]);
      HWY_UNROLL(4)
      for (int v = 0; v < kVectors; ++v) acc[k][v] = hn::MulAdd(key, query[v], acc[k][v]);
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
HWY_INLINE void score_panel(const TileRun<T>& run, const Sources<T>& next, int32_t panel,
                            int32_t num_keys, int part, int32_t first, int32_t last) {
  const int32_t column = part_of(run, part).begin + first;
  const float* queries = run.queries + int64_t{panel} * kPanelRows * run.layout.width_padded +
                         int64_t{column} * kVectors * kLanes;
  const float* keys = run.keys + column;
  float* scores = run.panel_scores(panel);
  for (int32_t k = 0; k < num_keys; k += kKeys) {
    for (int32_t ahead = k + panel; ahead < k + kKeys; ahead += run.num_panels) {
      prefetch_columns(next, part, first, last, ahead);
    }
    score_tile<kKeys, kVectors>(keys + int64_t{k} * run.layout.key_stride, run.layout.key_stride,
                                queries, last - first, scores + int64_t{k} * kVectors * kLanes,
                                column == 0);
  }
}

// Keys of the block that the panel's last row sees: a prefix.
template <class T>
HWY_INLINE int32_t panel_keys(const TileRun<T>& run, int32_t panel, int64_t begin, int32_t count) {
  const int64_t seen = run.ends[run.panel_last_row(panel)] - begin;
  return static_cast<int32_t>(seen < 0 ? 0 : (seen < count ? seen : count));
}

template <class T>
HWY_INLINE void score_by_rows(const TileRun<T>& run, const Sources<T>& block,
                              const Sources<T>& next, int64_t begin) {
  constexpr int32_t kPad = RegisterTile::kNarrowKeys;  // a multiple of kWideKeys
  static_assert(kPad % RegisterTile::kWideKeys == 0);
  const int32_t padded = (block.count + kPad - 1) / kPad * kPad;
  for (int part = 0; part < 2; ++part) {
    const int32_t part_columns = part_of(run, part).padded;
    for (int32_t first = 0; first < part_columns; first += kChunkColumns) {
      const int32_t left = part_columns - first;
      const int32_t last = first + (left < kChunkColumns ? left : kChunkColumns);
      widen_keys(run, block, part, first, last, 0, block.count, padded);
      for (int32_t panel = 0; panel < run.num_panels; ++panel) {
        const int32_t num_keys = panel_keys(run, panel, begin, block.count);
        if (run.panel_vectors(panel) == 2) {
          score_panel<RegisterTile::kWideKeys, 2>(run, next, panel, num_keys, part, first, last);
        } else {
          score_panel<RegisterTile::kNarrowKeys, 1>(run, next, panel, num_keys, part, first, last);
        }
      }
    }
  }
}

// scores[key][row] of kRows rows and kKeys keys as dot products along the columns.
template <int kRows, int kKeys>
HWY_INLINE void dot_tile(const float* HWY_RESTRICT keys, int64_t key_stride,
                         const float* HWY_RESTRICT queries, int32_t columns,
                         float* HWY_RESTRICT scores) {
  const FloatTag d;
  Vec acc[kRows][kKeys];
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (int k = 0; k < kKeys; ++k) acc[r][k] = hn::Zero(d);
  }
  for (int32_t c = 0; c < columns; c += kLanes) {
    Vec query[kRows];
    HWY_UNROLL(4)
    for (int r = 0; r < kRows; ++r) query[r] = hn::Load(d, queries + int64_t{r} * columns + c);
    HWY_UNROLL(4)
    for (int k = 0; k < kKeys; ++k) {
      const Vec key = hn::Load(d, keys + k * key_stride + c);
      HWY_UNROLL(4)
      for (int r = 0; r < kRows; ++r) acc[r][k] = hn::MulAdd(key, query[r], acc[r][k]);
    }
  }
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (int k = 0; k < kKeys; ++k) {
      scores[k * kLanes + r] = hn::GetLane(hn::SumOfLanes(d, acc[r][k]));
    }
  }
}

template <class T>
HWY_INLINE void score_by_dot(const TileRun<T>& run, const Sources<T>& block,
                             const Sources<T>& next) {
  constexpr int kKeys = RegisterTile::kDotKeys;
  const int32_t width = run.layout.width_padded;
  const int64_t stride = run.layout.key_stride;
  for (int32_t k = 0; k < block.count; k += kKeys) {
    for (int part = 0; part < 2; ++part) {
      const int32_t columns = part_of(run, part).padded;
      const int32_t key_end = k + kKeys < block.count ? k + kKeys : block.count;
      widen_keys(run, block, part, 0, columns, k, key_end, k + kKeys);
      for (int i = 0; i < kKeys; ++i) prefetch_columns(next, part, 0, columns, k + i);
    }
    const float* keys = run.keys + k * stride;
    float* scores = run.scores + int64_t{k} * kLanes;
    const float* queries = run.queries;
    int32_t rows = run.tile.num_rows;
    for (; rows >= 4; rows -= 4, queries += int64_t{4} * width, scores += 4) {
      dot_tile<4, kKeys>(keys, stride, queries, width, scores);
    }
    if (rows >= 2) {
      dot_tile<2, kKeys>(keys, stride, queries, width, scores);
      queries += int64_t{2} * width;
      scores += 2;
    }
    if (rows % 2 == 1) dot_tile<1, kKeys>(keys, stride, queries, width, scores);
  }
}

// ---------------------------------------------------------------------------------------------
// 4 weigh

// Scores become weights relative to the running maximum; `sum` and `rescale` follow.
template <class T>
HWY_INLINE void weigh_block(const TileRun<T>& run, int32_t panel, int64_t begin, int32_t num_keys) {
  const FloatTag d;
  const IntTag ints;
  const int64_t stride = int64_t{run.panel_vectors(panel)} * kLanes;
  const Vec scale = hn::Set(d, run.params.sm_scale);
  const int32_t first_row = panel * kPanelRows;
  const bool all_visible =
      run.ends[first_row] >= begin + num_keys;  // rows see more from row to row
  for (int32_t row = first_row; row < first_row + stride; row += kLanes) {
    float* scores = run.panel_scores(panel) + (row - first_row);
    if (!all_visible) {
      const auto end = hn::Load(ints, run.ends + row);
      for (int32_t k = 0; k < num_keys; ++k) {
        const auto key = hn::Set(ints, static_cast<int32_t>(begin + k));
        const auto visible = hn::RebindMask(d, hn::Lt(key, end));
        float* at = scores + k * stride;
        hn::Store(hn::IfThenElse(visible, hn::Load(d, at), hn::Set(d, -kInfinity)), d, at);
      }
    }
    Vec largest = hn::Set(d, -kInfinity);
    for (int32_t k = 0; k < num_keys; ++k) {
      largest = hn::Max(hn::Load(d, scores + k * stride), largest);
    }
    const Vec old_max = hn::Load(d, run.maximum + row);
    const Vec new_max = hn::Max(hn::Mul(largest, scale), old_max);
    // A row that has seen no key yet has the maximum -inf; less 0, its weights are 0, not NaN.
    const auto seen = hn::Ne(new_max, hn::Set(d, -kInfinity));
    const Vec base = hn::IfThenElseZero(seen, new_max);
    Vec sum = hn::Zero(d);
    for (int32_t k = 0; k < num_keys; ++k) {
      float* at = scores + k * stride;
      const Vec weight = exp_negative(hn::MulSub(hn::Load(d, at), scale, base));
      hn::Store(weight, d, at);
      sum = hn::Add(sum, weight);
    }
    const Vec rescale = exp_negative(hn::Sub(old_max, base));
    hn::Store(new_max, d, run.maximum + row);
    hn::Store(rescale, d, run.rescale + row);
    hn::Store(hn::MulAdd(hn::Load(d, run.sum + row), rescale, sum), d, run.sum + row);
  }
}

// ---------------------------------------------------------------------------------------------
// 5 accumulate

// out[row][column] = out * rescale + sum over keys of weights[key][row] * values[key][column].
template <int kRows, int kVectors>
HWY_INLINE void value_tile(const float* HWY_RESTRICT weights, int64_t weight_stride,
                           const float* HWY_RESTRICT values, int64_t value_stride, int32_t num_keys,
                           const float* HWY_RESTRICT rescale, float* HWY_RESTRICT out,
                           int64_t out_stride) {
  const FloatTag d;
  Vec acc[kRows][kVectors];
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::Zero(d);
  }
  for (int32_t k = 0; k < num_keys; ++k) {
    Vec value[kVectors];
    HWY_UNROLL(4)
    for (int v = 0; v < kVectors; ++v) value[v] = hn::Load(d, values + v * kLanes);
    HWY_UNROLL(4)
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = hn::Set(d, weights[r]);
      HWY_UNROLL(4)
      for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::MulAdd(weight, value[v], acc[r][v]);
    }
    values += value_stride;
    weights += weight_stride;
  }
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    const Vec factor = hn::Set(d, rescale[r]);
    HWY_UNROLL(4)
    for (int v = 0; v < kVectors; ++v) {
      float* to = out + r * out_stride + v * kLanes;
      hn::Store(hn::MulAdd(hn::Load(d, to), factor, acc[r][v]), d, to);
    }
  }
}

// One stripe of columns, for all rows of a panel that see a key of this block.
template <int kVectors, class T>
HWY_INLINE void accumulate_stripe(const TileRun<T>& run, int32_t panel, int64_t begin,
                                  int32_t count, int32_t column) {
  const int64_t weight_stride = int64_t{run.panel_vectors(panel)} * kLanes;
  const int64_t key_stride = run.layout.key_stride;
  const int64_t out_stride = run.layout.out_stride;
  const int32_t first_row = panel * kPanelRows;
  const int32_t end_row = run.panel_last_row(panel) + 1;
  for (int32_t row = first_row; row < end_row;) {
    const int32_t left = end_row - row;
    const int32_t rows = left >= 4 ? 4 : (left >= 2 ? 2 : 1);
    const int64_t seen = run.ends[row + rows - 1] - begin;
    const auto num_keys = static_cast<int32_t>(seen < count ? seen : count);
    const float* weights = run.panel_scores(panel) + (row - first_row);
    const float* values = run.keys + column;
    float* out = run.out + row * out_stride + column;
    if (num_keys <= 0) {
      // These rows see none of the block: nothing changes.
    } else if (rows == 4) {
      value_tile<4, kVectors>(weights, weight_stride, values, key_stride, num_keys,
                              run.rescale + row, out, out_stride);
    } else if (rows == 2) {
      value_tile<2, kVectors>(weights, weight_stride, values, key_stride, num_keys,
                              run.rescale + row, out, out_stride);
    } else {
      value_tile<1, kVectors>(weights, weight_stride, values, key_stride, num_keys,
                              run.rescale + row, out, out_stride);
    }
    row += rows;
  }
}

template <class T>
HWY_INLINE void accumulate_block(const TileRun<T>& run, int64_t begin, int32_t count) {
  constexpr int32_t kStripe = RegisterTile::kOutVectors * kLanes;
  int32_t column = 0;
  for (; column + kStripe <= run.layout.rank_padded; column += kStripe) {
    for (int32_t panel = 0; panel < run.num_panels; ++panel) {
      accumulate_stripe<RegisterTile::kOutVectors>(run, panel, begin, count, column);
    }
  }
  for (; column < run.layout.rank_padded; column += kLanes) {
    for (int32_t panel = 0; panel < run.num_panels; ++panel) {
      accumulate_stripe<1>(run, panel, begin, count, column);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// 6 fold

// Moves the sums since the last fold into the total. In fp32, 200,000 equal terms that are added
// one block after the other lose 4e-5 of the sum; in two levels 1e-6.
template <class T>
HWY_INLINE void fold(const TileRun<T>& run, bool first) {
  const FloatTag d;
  for (int32_t row = 0; row < run.num_row_vectors * kLanes; row += kLanes) {
    const Vec maximum = hn::Load(d, run.maximum + row);
    const Vec sum = hn::Load(d, run.sum + row);
    if (first) {
      hn::Store(sum, d, run.total_sum + row);
    } else {
      const auto seen = hn::Ne(maximum, hn::Set(d, -kInfinity));
      const Vec base = hn::IfThenElseZero(seen, maximum);
      const Vec rescale = exp_negative(hn::Sub(hn::Load(d, run.total_max + row), base));
      const Vec total = hn::Load(d, run.total_sum + row);
      hn::Store(rescale, d, run.rescale + row);
      hn::Store(hn::MulAdd(total, rescale, sum), d, run.total_sum + row);
    }
    hn::Store(maximum, d, run.total_max + row);
    hn::Store(hn::Zero(d), d, run.sum + row);
  }
  for (int32_t row = 0; row < run.tile.num_rows; ++row) {
    float* out = run.out + int64_t{row} * run.layout.out_stride;
    float* total = run.total + int64_t{row} * run.layout.out_stride;
    const Vec rescale = hn::Set(d, run.rescale[row]);
    for (int32_t c = 0; c < run.layout.rank_padded; c += kLanes) {
      const Vec part = hn::Load(d, out + c);
      hn::Store(first ? part : hn::MulAdd(hn::Load(d, total + c), rescale, part), d, total + c);
      hn::Store(hn::Zero(d), d, out + c);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// 7 write

template <class Out>
HWY_INLINE void write_values(const float* values, float scale, int32_t count, Out* to) {
  const FloatTag d;
  const Vec factor = hn::Set(d, scale);
  int32_t c = 0;
  for (; c + kLanes <= count; c += kLanes) narrow(hn::Mul(hn::Load(d, values + c), factor), to + c);
  if (c == count) return;
  Out last[kLanes];
  narrow(hn::Mul(hn::Load(d, values + c), factor), last);
  for (int32_t i = 0; c + i < count; ++i) to[c + i] = last[i];
}

template <class T>
HWY_INLINE void write_rows(const TileRun<T>& run) {
  const AttentionParams& params = run.params;
  const plan::Tile& tile = run.tile;
  for (int32_t row = 0; row < tile.num_rows; ++row) {
    const float* values = run.total + int64_t{row} * run.layout.out_stride;
    const float sum = run.total_sum[row];
    const float scale = sum == 0 ? 0.0F : 1.0F / sum;
    const double lse = static_cast<double>(run.total_max[row]) + std::log(static_cast<double>(sum));
    const float natural_lse = sum == 0 ? -kInfinity : static_cast<float>(lse);
    if (tile.partial_begin >= 0) {
      const int64_t at = tile.partial_begin + row;
      write_values(values, scale, run.rank(), params.partial_out + at * run.rank());
      params.partial_lse[at] = natural_lse;
    } else {
      const RowPlace at = place_of(params, tile.request, tile.row_begin + row);
      write_values(values, scale, run.rank(),
                   static_cast<T*>(params.out) + at.token * params.out_token_stride +
                       at.head * params.out_head_stride);
      write_lse(params, at, natural_lse);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// The stages in their order

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
