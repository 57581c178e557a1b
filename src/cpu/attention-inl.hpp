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
#include <type_traits>

#include "core/attention_impl.hpp"
#include "cpu/rows.hpp"
#include "cpu/tile_layout.hpp"
#include "hwy/highway.h"
#include "mla/dtype.hpp"

// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result): int32 products are offsets
// within a worker's memory, at most 2 MiB; offsets into tensors and the pool are int64 from the
// start.
HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using IntTag = hn::RebindToSigned<FloatTag>;
using WordTag = hn::RebindToUnsigned<FloatTag>;
using Vec = hn::Vec<FloatTag>;

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
constexpr int32_t kLanes = static_cast<int32_t>(hn::MaxLanes(FloatTag()));
constexpr int32_t kPanelRows = kLanes * RegisterTile::kWideVectors;
constexpr int32_t kColumnStep = 4;  // columns of one step of a score tile
// Blocks between two folds: 32 x 96 terms are summed at most before they join the total.
constexpr int32_t kFoldBlocks = 32;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------------------------------------
// Conversions

// Columns are widened and narrowed two vectors at a time. Of bf16, the even columns of the pair
// come first and then the odd ones: that takes one instruction a vector, where the order of memory
// takes two. Queries, keys and outputs all lie so in the working memory, and writing restores the
// order.
struct VecPair {
  Vec first;
  Vec second;
};
constexpr int32_t kPair = 2 * kLanes;

HWY_INLINE VecPair widen(const float* from) {
  return {hn::LoadU(FloatTag(), from), hn::LoadU(FloatTag(), from + kLanes)};
}
HWY_INLINE void narrow(VecPair values, float* to) {
  hn::StoreU(values.first, FloatTag(), to);
  hn::StoreU(values.second, FloatTag(), to + kLanes);
}

#if HWY_TARGET == HWY_SCALAR  // Highway's conversions of one lane truncate; its fp16 knows no NaN
template <class T>
HWY_INLINE VecPair widen(const T* from) {
  return {hn::Set(FloatTag(), static_cast<float>(from[0])),
          hn::Set(FloatTag(), static_cast<float>(from[1]))};
}
template <class T>
HWY_INLINE void narrow(VecPair values, T* to) {
  to[0] = T(hn::GetLane(values.first));
  to[1] = T(hn::GetLane(values.second));
}
HWY_INLINE void restore_order(VecPair values, const BFloat16*, float* to) { narrow(values, to); }
#else
HWY_INLINE VecPair split_words(hn::Vec<hn::Repartition<uint16_t, FloatTag> > halves) {
  const WordTag words;
  const auto both = hn::BitCast(words, halves);
  return {hn::BitCast(FloatTag(), hn::ShiftLeft<16>(both)),
          hn::BitCast(FloatTag(), hn::And(both, hn::Set(words, 0xffff0000U)))};
}
HWY_INLINE VecPair widen(const BFloat16* from) {
  const hn::Repartition<uint16_t, FloatTag> halves;
  return split_words(hn::LoadU(halves, reinterpret_cast<const uint16_t*>(from)));
}
// Half a pair, then zeros.
HWY_INLINE VecPair widen_half(const BFloat16* from) {
  const hn::Repartition<uint16_t, FloatTag> halves;
  const hn::Half<decltype(halves)> half;
  const auto loaded = hn::LoadU(half, reinterpret_cast<const uint16_t*>(from));
  return split_words(hn::ZeroExtendVector(halves, loaded));
}

// Highway cuts fp32 to bf16; this rounds to nearest even and keeps NaN. The result is in the upper
// half of each word, the lower half is of no use.
HWY_INLINE hn::Vec<WordTag> round_to_bf16(Vec value) {
  const WordTag words;
  const auto bits = hn::BitCast(words, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1U));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(words, 0x7fffU)), odd);
  const auto quiet = hn::Or(bits, hn::Set(words, 0x00400000U));
  return hn::IfThenElse(hn::RebindMask(words, hn::IsNaN(value)), quiet, rounded);
}

HWY_INLINE void narrow(VecPair values, BFloat16* to) {
  const hn::Repartition<uint16_t, FloatTag> halves;
  const auto even = hn::ShiftRight<16>(round_to_bf16(values.first));
  const auto odd = hn::And(round_to_bf16(values.second), hn::Set(WordTag(), 0xffff0000U));
  hn::StoreU(hn::BitCast(halves, hn::Or(even, odd)), halves, reinterpret_cast<uint16_t*>(to));
}
HWY_INLINE void restore_order(VecPair values, const BFloat16*, float* to) {
  hn::StoreInterleaved2(values.first, values.second, FloatTag(), to);
}

HWY_INLINE VecPair widen(const Float16* from) {
  const hn::Rebind<uint16_t, FloatTag> bits;
  const hn::Rebind<hwy::float16_t, FloatTag> tag;
  const auto half = [&](const Float16* at) HWY_ATTR {
    const auto loaded = hn::LoadU(bits, reinterpret_cast<const uint16_t*>(at));
    return hn::PromoteTo(FloatTag(), hn::BitCast(tag, loaded));
  };
  return {half(from), half(from + kLanes)};
}

HWY_INLINE void narrow(VecPair values, Float16* to) {  // the hardware's: to nearest even
  const hn::Rebind<uint16_t, FloatTag> bits;
  const hn::Rebind<hwy::float16_t, FloatTag> tag;
  auto* halves = reinterpret_cast<uint16_t*>(to);
  hn::StoreU(hn::BitCast(bits, hn::DemoteTo(tag, values.first)), bits, halves);
  hn::StoreU(hn::BitCast(bits, hn::DemoteTo(tag, values.second)), bits, halves + kLanes);
}
#endif
template <class T>
HWY_INLINE void restore_order(VecPair values, const T*, float* to) {
  narrow(values, to);
}

// The first `count` elements, then zeros; reads no others.
template <class T>
HWY_INLINE VecPair widen_first(const T* from, int32_t count) {
  if (count >= kPair) return widen(from);
#if HWY_TARGET != HWY_SCALAR
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (count == kLanes) return widen_half(from);  // 16 rope columns, say
  }
#endif
  T padded[kPair] = {};
  for (int32_t i = 0; i < count; ++i) padded[i] = from[i];
  return widen(padded);
}

HWY_INLINE void store_pair(VecPair values, float* to) {
  hn::Store(values.first, FloatTag(), to);
  hn::Store(values.second, FloatTag(), to + kLanes);
}

// e^x to 2^-23 for x <= 0 or a rounding error above it (which for scores beyond 2^24 is more than
// 1; above 64 it is cut, so that even the largest scores give numbers). 0 below -87, where fp32 has
// no normal numbers left; exactly 1 at 0; NaN stays NaN.
HWY_INLINE Vec exp_near_zero(Vec x) {
  const FloatTag d;
  const Vec limit = hn::Set(d, 92.0F);
  const Vec scaled = hn::Mul(x, hn::Set(d, 1.44269504F));
  const Vec y = hn::IfThenElse(hn::Gt(scaled, limit), limit, scaled);
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

// ---------------------------------------------------------------------------------------------
// 3 score

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

// ---------------------------------------------------------------------------------------------
// 4 weigh

// Scores become weights relative to the running maximum; `sum` and `rescale` follow.
template <class T>
HWY_INLINE void weigh_block(const TileRun<T>& run, int32_t panel, int64_t begin, int32_t num_keys) {
  const FloatTag d;
  const IntTag ints;
  const int64_t stride = int64_t{run.panel_vectors(panel)} * kLanes;
  const int32_t num_parts = run.by_dot ? 1 : run.num_parts();
  const int64_t part = run.panel_scores(panel, 1) - run.panel_scores(panel, 0);
  const Vec scale = hn::Set(d, run.params.sm_scale);
  const int32_t first_row = panel * kPanelRows;
  const bool all_visible =
      run.ends[first_row] >= begin + num_keys;  // rows see more from row to row
  for (int32_t row = first_row; row < first_row + stride; row += kLanes) {
    float* scores = run.panel_scores(panel, 0) + (row - first_row);
    if (!all_visible) {
      const auto end = hn::Load(ints, run.ends + row);
      for (int32_t k = 0; k < num_keys; ++k) {
        const auto key = hn::Set(ints, static_cast<int32_t>(begin + k));
        const auto visible = hn::RebindMask(d, hn::Lt(key, end));
        float* at = scores + k * stride;
        hn::Store(hn::IfThenElse(visible, hn::Load(d, at), hn::Set(d, -kInfinity)), d, at);
        for (int32_t i = 1; i < num_parts; ++i) {
          hn::Store(hn::IfThenElseZero(visible, hn::Load(d, at + i * part)), d, at + i * part);
        }
      }
    }
    Vec largest = hn::Set(d, -kInfinity);
    for (int32_t k = 0; k < num_keys; ++k) {
      Vec score = hn::Load(d, scores + k * stride);
      for (int32_t i = 1; i < num_parts; ++i) {
        score = hn::Add(score, hn::Load(d, scores + k * stride + i * part));
      }
      largest = hn::Max(score, largest);
    }
    const Vec old_max = hn::Load(d, run.maximum + row);
    const Vec new_max = hn::Max(hn::Mul(largest, scale), old_max);
    // A row that has seen no key yet has the maximum -inf; less 0, its weights are 0, not NaN.
    const auto seen = hn::Ne(new_max, hn::Set(d, -kInfinity));
    const Vec base = hn::IfThenElseZero(seen, new_max);
    // Scores so large that the rounding of `above` below would be more than a weight can stand (one
    // unit in the last place is 1/8 from here on): they are weighed as the maximum was found, so
    // that the largest has weight 1.
    const auto huge = hn::Gt(hn::Abs(base), hn::Set(d, 1048576.0F));
    const bool any_huge = !hn::AllFalse(d, huge);
    Vec sum = hn::Zero(d);
    for (int32_t k = 0; k < num_keys; ++k) {
      float* at = scores + k * stride;
      // From the base on, so that what is rounded becomes small: the weight of a score near the
      // maximum is exact to more than the last place of the score.
      Vec above = hn::MulSub(hn::Load(d, at), scale, base);
      for (int32_t i = 1; i < num_parts; ++i) {
        above = hn::MulAdd(hn::Load(d, at + i * part), scale, above);
      }
      if (any_huge) {
        Vec score = hn::Load(d, at);
        for (int32_t i = 1; i < num_parts; ++i) score = hn::Add(score, hn::Load(d, at + i * part));
        // The minimum keeps the compiler from fusing the two, which would not round the product.
        const Vec product = hn::Min(hn::Mul(score, scale), base);
        above = hn::IfThenElse(huge, hn::Sub(product, base), above);
      }
      const Vec weight = exp_near_zero(above);
      hn::Store(weight, d, at);
      sum = hn::Add(sum, weight);
    }
    const Vec rescale = exp_near_zero(hn::Sub(old_max, base));
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
                           const float* HWY_RESTRICT values, int32_t num_keys,
                           const float* HWY_RESTRICT rescale, float* HWY_RESTRICT out,
                           int64_t out_stride) {
  const FloatTag d;
  Vec acc[kRows][kVectors];
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::Zero(d);
  }
  const auto add_key = [&]() HWY_ATTR {
    Vec value[kVectors];
    HWY_UNROLL(4)
    for (int v = 0; v < kVectors; ++v) value[v] = hn::Load(d, values + v * kLanes);
    HWY_UNROLL(4)
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = hn::Set(d, weights[r]);
      HWY_UNROLL(4)
      for (int v = 0; v < kVectors; ++v) acc[r][v] = hn::MulAdd(weight, value[v], acc[r][v]);
    }
    values += kChunkColumns;
    weights += weight_stride;
  };
  int32_t k = 0;
  for (; k + 4 <= num_keys; k += 4) {
    add_key();
    add_key();
    add_key();
    add_key();
  }
  for (; k < num_keys; ++k) add_key();
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

// A stripe of columns, for all rows of a panel that see a key of this block.
template <int kVectors, class T>
HWY_INLINE void accumulate_stripe(const TileRun<T>& run, int32_t panel, int64_t begin,
                                  int32_t count, const float* values, float* out) {
  const int64_t weight_stride = int64_t{run.panel_vectors(panel)} * kLanes;
  const int64_t out_stride = run.layout.out_stride;
  const int32_t first_row = panel * kPanelRows;
  const int32_t end_row = run.panel_last_row(panel) + 1;
  for (int32_t row = first_row; row < end_row;) {
    const int32_t left = end_row - row;
    const int32_t rows = left >= 4 ? 4 : (left >= 2 ? 2 : 1);
    const int64_t seen = run.ends[row + rows - 1] - begin;
    const auto num_keys = static_cast<int32_t>(seen < count ? seen : count);
    const float* weights = run.panel_weights(panel) + (row - first_row);
    const float* rescale = run.rescale + row;
    float* to = out + row * out_stride;
    if (num_keys <= 0) {
      // These rows see none of the block: nothing changes.
    } else if (rows == 4) {
      value_tile<4, kVectors>(weights, weight_stride, values, num_keys, rescale, to, out_stride);
    } else if (rows == 2) {
      value_tile<2, kVectors>(weights, weight_stride, values, num_keys, rescale, to, out_stride);
    } else {
      value_tile<1, kVectors>(weights, weight_stride, values, num_keys, rescale, to, out_stride);
    }
    row += rows;
  }
}

template <class T>
HWY_INLINE void accumulate_block(const TileRun<T>& run, int64_t begin, int32_t count) {
  constexpr int32_t kStripe = RegisterTile::kOutVectors * kLanes;
  static_assert(kChunkColumns % kStripe == 0);
  for (int32_t index = 0; index < run.layout.rank_chunks; ++index) {
    const int32_t columns = chunk_of(run, index).padded;
    const float* values = run.chunk_keys(index);
    float* out = run.out + index * kChunkColumns;
    for (int32_t panel = 0; panel < run.num_panels; ++panel) {
      int32_t c = 0;
      for (; c + kStripe <= columns; c += kStripe) {
        accumulate_stripe<RegisterTile::kOutVectors>(run, panel, begin, count, values + c, out + c);
      }
      for (; c < columns; c += kLanes) {
        accumulate_stripe<1>(run, panel, begin, count, values + c, out + c);
      }
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
      const Vec rescale = exp_near_zero(hn::Sub(hn::Load(d, run.total_max + row), base));
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
    const int32_t columns = (run.rank() + kPair - 1) / kPair * kPair;
    for (int32_t c = 0; c < columns; c += kLanes) {
      const Vec part = hn::Load(d, out + c);
      hn::Store(first ? part : hn::MulAdd(hn::Load(d, total + c), rescale, part), d, total + c);
      hn::Store(hn::Zero(d), d, out + c);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// 7 write

// values x scale to the output's dtype, or to fp32 in the order of memory.
template <class T, class Out>
HWY_INLINE void write_values(const float* values, float scale, int32_t count, Out* to) {
  const FloatTag d;
  const Vec factor = hn::Set(d, scale);
  for (int32_t c = 0; c < count; c += kPair) {
    const VecPair pair{hn::Mul(hn::Load(d, values + c), factor),
                       hn::Mul(hn::Load(d, values + c + kLanes), factor)};
    const auto store = [&](Out* at) HWY_ATTR {
      if constexpr (sizeof(T) == sizeof(Out)) {
        narrow(pair, at);
      } else {
        restore_order(pair, static_cast<const T*>(nullptr), at);
      }
    };
    if (c + kPair <= count) {
      store(to + c);
      continue;
    }
    Out last[kPair];
    store(last);
    for (int32_t i = 0; c + i < count; ++i) to[c + i] = last[i];
  }
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
      write_values<T>(values, scale, run.rank(), params.partial_out + at * run.rank());
      params.partial_lse[at] = natural_lse;
    } else {
      const RowPlace at = place_of(params, tile.request, tile.row_begin + row);
      write_values<T>(values, scale, run.rank(),
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
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
