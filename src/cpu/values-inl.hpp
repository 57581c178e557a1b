#pragma once

// What comes out: stage 5 adds up weighted values, stage 6 folds the sums into the total, stage 7
// writes it. For attention-inl.hpp.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cpu/rows.hpp"
#include "cpu/tile-inl.hpp"

// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result): see tile-inl.hpp
HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {

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

// Blocks between two folds: 32 x 96 terms are summed at most before they join the total.
constexpr int32_t kFoldBlocks = 32;

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

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
