#pragma once

#include <cmath>
#include <numbers>

#include "cuda/general/tensor_core/load.cuh"

// The score warps: scores = queries x keys, and from them the weights of each block of keys.
namespace mla::cuda::general::tensor_core {

/// A score warp's part of a block: 16 rows, and a run of keys.
template <class Traits>
struct ScoreShare {
  int row_tile, group, first_key;

  __device__ explicit ScoreShare(int warp)
      : row_tile(warp % Traits::kRowTiles),
        group(warp / Traits::kRowTiles),
        first_key(group * 8 * Traits::kKeyTiles) {}
  /// The thread's rows of the tile: h = 0 and 1.
  __device__ int row(int h, int lane) const { return row_tile * kRowTile + h * 8 + lane / 4; }
};

template <class Tile, class Traits = typename Tile::Traits>
__device__ void score_block(const Tile& t, const std::byte* keys, const ScoreShare<Traits>& share,
                            float (&scores)[Traits::kKeyTiles][4]) {
  constexpr int kKeyTiles = Traits::kKeyTiles;
  constexpr int kKeysAtOnce = kKeyTiles == 1 ? 1 : 2;  // key tiles of one load
  constexpr int kProducts = 4;                         // of 16 columns, in a group of columns
  const int row_bytes = t.params.shape.row_bytes;
  const int query_row = share.row_tile * kRowTile + t.lane % 16;
  const int key_row = share.first_key + t.lane / 16 * 8 + t.lane % 8;
  uint32_t query_at = shared_address(t.shared.queries + query_row * row_bytes) +
                      chunk_offset(query_row, t.lane / 16);
  uint32_t key_at =
      shared_address(keys + key_row * row_bytes) + chunk_offset(key_row, t.lane / 8 % 2);
  // Operands are loaded three products ahead.
  uint32_t a[kProducts][4];
  uint32_t b[kProducts][kKeyTiles / kKeysAtOnce][2 * kKeysAtOnce];
  const auto load = [&](int product) {
    load_matrices(a[product], two_chunks_on(query_at, product));
#pragma unroll
    for (int i = 0; i < kKeyTiles / kKeysAtOnce; ++i) {
      load_matrices(b[product][i], two_chunks_on(key_at + i * 16 * row_bytes, product));
    }
  };
  // Tensor cores cut off low bits of every sum, so each of a group's products has a sum of its own.
  float sums[kProducts][kKeyTiles][4] = {};
  const auto multiply = [&](int product) {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      const uint32_t* const pair = &b[product][i / kKeysAtOnce][i % kKeysAtOnce * 2];
      multiply_add<typename Tile::T>(sums[product][i], a[product], pair[0], pair[1]);
    }
  };
#pragma unroll
  for (int product = 0; product < kProducts - 1; ++product) load(product);
  // Of the last group of narrow rows only the columns that are used; else whole groups.
  constexpr bool kSkipsPadding = Traits::kColumnTiles == 2;
  constexpr int kStep = kSkipsPadding ? kGroupColumns : 1;
  int left = kSkipsPadding ? t.params.shape.rope_column + t.geometry().qk_rope_head_dim
                           : t.params.shape.width / kGroupColumns;
#pragma unroll 1
  do {
    load(kProducts - 1);
    multiply(0);
    query_at += kGroupColumns * sizeof(typename Tile::T);
    key_at += kGroupColumns * sizeof(typename Tile::T);
    left -= kStep;
#pragma unroll
    for (int product = 1; product < kProducts; ++product) {
      if (left > 0) load(product - 1);
      if (!kSkipsPadding || left > (product - kProducts) * 16) multiply(product);
    }
  } while (left > 0);
#pragma unroll
  for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      scores[i][v] = (sums[0][i][v] + sums[1][i][v]) + (sums[2][i][v] + sums[3][i][v]);
    }
  }
}

/// The maximum over the four lanes that hold one row.
__device__ inline float max_over_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}
__device__ inline float sum_over_quad(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

template <class T>
__device__ void store_pair(std::byte* at, float first, float second);
template <>
__device__ inline void store_pair<__nv_bfloat16>(std::byte* at, float first, float second) {
  *reinterpret_cast<__nv_bfloat162*>(at) = __floats2bfloat162_rn(first, second);
}
template <>
__device__ inline void store_pair<__half>(std::byte* at, float first, float second) {
  *reinterpret_cast<__half2*>(at) = __floats2half2_rn(first, second);
}

/// What a thread knows of its two rows. The reference is what scores are taken relative to: a
/// score of the row that is at most 2^kSlack below its maximum, so that it moves seldom.
struct RowState {
  float reference[2] = {-INFINITY, -INFINITY};  // base 2
  float sum[2] = {0, 0};                        // of this thread's weights
};
constexpr float kSlack = 8;

/// The maxima of the block's scores that this warp has; to all warps that share its rows.
template <class Tile, class Traits = typename Tile::Traits>
__device__ void find_maxima(const Tile& t, const ScoreShare<Traits>& share,
                            const float (&scores)[Traits::kKeyTiles][4], float (&largest)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = -INFINITY;
#pragma unroll
    for (int i = 0; i < Traits::kKeyTiles; ++i) {
      largest[h] = fmaxf(largest[h], fmaxf(scores[i][2 * h], scores[i][2 * h + 1]));
    }
    largest[h] = max_over_quad(largest[h]);
    if (Traits::kGroups > 1 && t.lane % 4 == 0) {
      t.shared.maxima[share.group * Traits::kRows + share.row(h, t.lane)] = largest[h];
    }
  }
}

template <class Tile, class Traits = typename Tile::Traits>
__device__ void weigh_block(const Tile& t, int block, const ScoreShare<Traits>& share,
                            const float (&scores)[Traits::kKeyTiles][4], float (&largest)[2],
                            RowState& state) {
  const int parity = block % 2;
  bool moves = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = share.row(h, t.lane);
    std::byte* const weights = t.shared.weights + row * Traits::kWeightRowBytes + t.lane % 4 * 4;
    if constexpr (Traits::kGroups > 1) {
#pragma unroll
      for (int g = 0; g < Traits::kGroups; ++g) {
        largest[h] = fmaxf(largest[h], t.shared.maxima[g * Traits::kRows + row]);
      }
    }
    float factor = 1;
    if (largest[h] > state.reference[h] + kSlack) {
      factor = exp2_approx(state.reference[h] - largest[h]);
      state.reference[h] = largest[h];
      moves = true;
    }
    const float base = state.reference[h] == -INFINITY ? 0.0F : state.reference[h];  // no key yet
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Traits::kKeyTiles; ++i) {
      const float first = exp2_approx(scores[i][2 * h] - base);
      const float second = exp2_approx(scores[i][2 * h + 1] - base);
      sum += first + second;
      const int chunk = (parity * Traits::kBlockKeys + share.first_key) / kChunk + i;
      store_pair<typename Tile::T>(weights + chunk_offset(row, chunk), first, second);
    }
    state.sum[h] = state.sum[h] * factor + sum;
    if (share.group == 0 && t.lane % 4 == 0) t.shared.factors[parity * kMaxTileRows + row] = factor;
  }
  moves = __any_sync(kAllLanes, moves);
  if (share.group == 0 && t.lane == 0) t.shared.moves[parity * 4 + share.row_tile] = moves;
}

template <class Tile, class Traits = typename Tile::Traits>
__device__ void score_tile(const Tile& t) {
  const ScoreShare<Traits> share(t.warp);
  const auto keys_of = [&](int row) {
    return min(t.tile.kv_end, visible_keys(t.plan(), t.geometry().num_heads, t.tile.request,
                                           t.tile.row_begin + row));
  };
  const int seen_by_all = keys_of(0);  // rows see more from one to the next
  int limit[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) limit[h] = keys_of(min(share.row(h, t.lane), t.tile.num_rows - 1));
  const float scale_log2 = t.plan().sm_scale * std::numbers::log2e_v<float>;

  RowState state;
  std::byte* keys = t.shared.keys;
  const int num_blocks = t.num_blocks();
  int begin = t.tile.kv_begin;
#pragma unroll 1
  for (int block = 0; block < num_blocks; ++block, begin += Traits::kBlockKeys) {
    meet();  // the block is there
    float scores[Traits::kKeyTiles][4];
    score_block(t, keys, share, scores);
    const bool is_masked = begin + Traits::kBlockKeys > seen_by_all;
#pragma unroll
    for (int i = 0; i < Traits::kKeyTiles; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        scores[i][v] *= scale_log2;
        const int key = begin + share.first_key + i * 8 + t.lane % 4 * 2 + v % 2;
        if (is_masked && key >= limit[v / 2]) scores[i][v] = -INFINITY;
      }
    }
    float largest[2];
    find_maxima(t, share, scores, largest);
    if constexpr (Traits::kGroups > 1) meet();  // maxima
    weigh_block(t, block, share, scores, largest, state);
    keys = t.after(keys);
  }
  meet();  // the tile before is written
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = sum_over_quad(state.sum[h]);
    const int row = share.row(h, t.lane);
    if (t.lane % 4 != 0) continue;
    t.shared.sums[share.group * Traits::kRows + row] = sum;
    if (share.group == 0) t.shared.largest[row] = state.reference[h];
  }
  meet();  // sums
}

}  // namespace mla::cuda::general::tensor_core
