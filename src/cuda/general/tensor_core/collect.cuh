#pragma once

#include <cmath>
#include <numbers>

#include "cuda/general/tensor_core/score.cuh"

// The value warps: they load keys, collect out = weights x values, and write it.
namespace mla::cuda::general::tensor_core {

/// out[row tile][column tile][4] of one warp: all rows, kColumnTiles tiles of 8 columns.
template <class Traits>
using Output = float[Traits::kRowTiles][Traits::kColumnTiles][4];

template <class Tile, class Traits = typename Tile::Traits>
__device__ void collect_block(const Tile& tile, int block, const std::byte* values,
                              Output<Traits>& out) {
  const Tile t = Traits::kColumnTiles == 2 ? tile : tile.anew();
  constexpr int kRowTiles = Traits::kRowTiles;
  constexpr int kColumnTiles = Traits::kColumnTiles;
  const TileShape& shape = t.params.shape;
  const int parity = block % 2;
  int moves[kRowTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) moves[m] = t.shared.moves[parity * 4 + m];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    if (moves[m] == 0) continue;
    const float* const factors =
        t.shared.factors + parity * kMaxTileRows + m * kRowTile + t.lane / 4;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      out[m][c][0] *= factors[0];
      out[m][c][1] *= factors[0];
      out[m][c][2] *= factors[8];
      out[m][c][3] *= factors[8];
    }
  }
  // Past the values it computes columns that nobody writes, from whatever else is in the row.
  const int lane_row = t.lane % 16;
  const int first_chunk = min(t.warp * kColumnTiles, shape.width / kChunk - kColumnTiles);
  const uint32_t value_at = shared_address(values + lane_row * shape.row_bytes) +
                            chunk_offset(lane_row, first_chunk + t.lane / 16);
  const uint32_t weight_at =
      shared_address(t.shared.weights + lane_row * Traits::kWeightRowBytes) +
      chunk_offset(lane_row, parity * (Traits::kBlockKeys / kChunk) + t.lane / 16);
  constexpr int kSteps = Traits::kBlockKeys / 16;
  // Where the output leaves room for them operands are loaded ahead of their products.
  constexpr int kAhead = kColumnTiles > 2 ? 0 : kSteps < 4 ? kSteps : 4;
  uint32_t a[kSteps][kRowTiles][4];
  uint32_t b[kSteps][kColumnTiles / 2][4];
  const auto load_weights = [&](int k, int m) {
    load_matrices(a[k][m], two_chunks_on(weight_at, k) + m * kRowTile * Traits::kWeightRowBytes);
  };
  const auto load = [&](int k) {
#pragma unroll
    for (int c = 0; c < kColumnTiles / 2; ++c) {
      load_matrices_transposed(b[k][c], two_chunks_on(value_at + k * 16 * shape.row_bytes, c));
    }
#pragma unroll
    for (int m = 0; kAhead > 0 && m < kRowTiles; ++m) load_weights(k, m);
  };
#pragma unroll
  for (int k = 0; k < kAhead; ++k) load(k);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (k + kAhead < kSteps) load(k + kAhead);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if (kAhead == 0) load_weights(k, m);
#pragma unroll
      for (int c = 0; c < kColumnTiles / 2; ++c) {
        multiply_add<typename Tile::T>(out[m][2 * c], a[k][m], b[k][c][0], b[k][c][1]);
        multiply_add<typename Tile::T>(out[m][2 * c + 1], a[k][m], b[k][c][2], b[k][c][3]);
      }
    }
  }
}

/// Two neighbouring columns of a row.
template <class U>
__device__ void write_pair(U* row, int column, int num_columns, float first, float second,
                           bool paired) {
  if (paired) {
    if (column < num_columns) {
      if constexpr (sizeof(U) == 4) {
        *reinterpret_cast<float2*>(row + column) = make_float2(first, second);
      } else {
        store_pair<U>(reinterpret_cast<std::byte*>(row + column), first, second);
      }
    }
    return;
  }
  if (column < num_columns) row[column] = from_float<U>(first);
  if (column + 1 < num_columns) row[column + 1] = from_float<U>(second);
}

template <class Tile, class Traits = typename Tile::Traits>
__device__ void write_tile(const Tile& t, const Output<Traits>& out) {
  constexpr int kRowTiles = Traits::kRowTiles;
  constexpr int kColumnTiles = Traits::kColumnTiles;
  const AttentionParams& tensors = t.tensors();
  const int rank = t.geometry().kv_lora_rank;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m * kRowTile + h * 8 + t.lane / 4;
      if (row >= t.tile.num_rows) continue;
      float sum = 0;
      for (int g = 0; g < Traits::kGroups; ++g) sum += t.shared.sums[g * Traits::kRows + row];
      const float inverse = sum == 0 ? 0.0F : 1 / sum;
      const RowPlace at =
          place_of(t.plan(), t.geometry().num_heads, t.tile.request, t.tile.row_begin + row);
      const int64_t partial = t.tile.partial_begin + row;
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        const int column = (t.warp * kColumnTiles + c) * 8 + t.lane % 4 * 2;
        const float first = out[m][c][2 * h] * inverse;
        const float second = out[m][c][2 * h + 1] * inverse;
        if (t.tile.partial_begin >= 0) {
          write_pair(tensors.partial_out + partial * rank, column, rank, first, second,
                     rank % 2 == 0);
        } else {
          write_pair(static_cast<typename Tile::T*>(tensors.out) +
                         at.token * tensors.out_token_stride + at.head * tensors.out_head_stride,
                     column, rank, first, second, t.params.paired_out);
        }
      }
      if (t.warp != 0 || t.lane % 4 != 0) continue;
      const float lse =
          sum == 0 ? -INFINITY : (t.shared.largest[row] + log2f(sum)) * std::numbers::ln2_v<float>;
      if (t.tile.partial_begin >= 0) {
        tensors.partial_lse[partial] = lse;
      } else {
        write_lse(tensors, t.plan(), at, lse);
      }
    }
  }
}

template <class Tile, class Traits = typename Tile::Traits>
__device__ void collect_tile(const Tile& t) {
  // With a second barrier in a step the place of the block just collected is filled again at once;
  // else a step later.
  constexpr bool kLoadsAtOnce = Traits::kGroups > 1;
  constexpr int kBlocksBefore =
      kLoadsAtOnce ? 1 : 2;  // that the ring still holds at a step's start
  const int num_ahead = t.num_stages() - kBlocksBefore;
  t.load_queries();
  KeyLoader<Tile> loader(t);
  Output<Traits> out = {};
  std::byte* values = t.shared.keys;
  const int num_blocks = t.num_blocks();
#pragma unroll 1
  for (int block = -num_ahead; block <= num_blocks; ++block) {
    if (block >= 0) {
      wait_for_all_but<kMaxStages - 2>(num_ahead - 1);
      meet();  // the block is there, and the weights of the one before it
    }
    if constexpr (!kLoadsAtOnce) loader.load();
    if (block > 0) {
      collect_block(t, block - 1, values, out);
      values = t.after(values);
    }
    if constexpr (kLoadsAtOnce) {
      if (block == num_blocks) break;
      if (block >= 0) meet();  // maxima; the block before is done with
      loader.load();
    }
  }
  meet();  // sums
  write_tile(t.anew(), out);
}

}  // namespace mla::cuda::general::tensor_core
