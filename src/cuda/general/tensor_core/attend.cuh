#pragma once

#include <cmath>
#include <numbers>

#include "cuda/general/mma.cuh"
#include "cuda/general/tensor_core/load.cuh"

// One block of 8 warps computes a tile: up to 64 rows of one request against a range of its keys,
// a block of keys at a time.
//
//   load      rows of queries once, then keys, in a ring of num_stages blocks (cp.async)
//   score     scores = queries x keys; warps share out rows (m) and keys (n)
//   weigh     running maximum of each row over all warps; weights exp2(score - maximum), 16 bits
//   collect   out = out * factor + weights x values; warps share out the columns, so that each
//             holds all rows: 64 x 64 fp32 in registers at 512 columns
//   write     out / sum, to the output or the partial results
//
// A barrier stands between the stages. docs/kernels/cuda_general.md has costs and measurements.
namespace mla::cuda::general::tensor_core {

/// How the warps share out the scores of a block: row tiles of 16, and runs of keys.
template <int kRowTiles, int kBlockKeys>
struct ScoreShare {
  static constexpr int kKeyTiles = kBlockKeys * kRowTiles / kWarps / 8 > 0
                                       ? kBlockKeys* kRowTiles / kWarps / 8
                                       : 1;  // of 8 keys
  static constexpr int kGroups = kBlockKeys / (8 * kKeyTiles);
  static constexpr int kRows = kRowTiles * kRowTile;

  int row_tile, group, first_key;
  bool is_idle;  // where there are fewer runs than warps

  __device__ explicit ScoreShare(int warp)
      : row_tile(warp % kRowTiles),
        group(warp / kRowTiles),
        first_key(group * 8 * kKeyTiles),
        is_idle(group >= kGroups) {}
};

template <class T, int kKeyTiles>
__device__ void score_block(const Tile<T>& t, const std::byte* keys, int row_tile, int first_key,
                            float (&scores)[kKeyTiles][4]) {
  constexpr int kGroupBytes = kGroupColumns * 2;
  const TileShape& shape = t.params.shape;
#pragma unroll
  for (auto& tile : scores) {
    for (float& score : tile) score = 0;
  }
  const int query_row = row_tile * kRowTile + t.lane % 16;
  const int key_row = first_key + t.lane % 8;
  const uint32_t query_at = smem_address(t.shared.queries + query_row * shape.row_bytes);
  const uint32_t key_at = smem_address(keys + key_row * shape.row_bytes);
  int query_offset[4];
  int key_offset[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) query_offset[i] = chunk_offset(query_row, 2 * i + t.lane / 16);
#pragma unroll
  for (int i = 0; i < 2; ++i) key_offset[i] = chunk_offset(key_row, 4 * i + t.lane / 8);
  // A step is 32 columns; its operands are loaded while the step before is computed.
  struct Operands {
    uint32_t a[2][4];
    uint32_t b[kKeyTiles][4];
  };
  const auto load = [&](Operands& to, int step) {
    const int half = step % 2;
    const int at = step / 2 * kGroupBytes;
    load_matrices(to.a[0], query_at + at + query_offset[2 * half]);
    load_matrices(to.a[1], query_at + at + query_offset[2 * half + 1]);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      load_matrices(to.b[i], key_at + at + i * 8 * shape.row_bytes + key_offset[half]);
    }
  };
  // Tensor cores cut off low bits of every sum: sums of 128 columns are added up outside of them.
  float sums[kKeyTiles][4] = {};
  const auto multiply = [&](const Operands& from) {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      multiply_add<T>(sums[i], from.a[0], from.b[i][0], from.b[i][1]);
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      multiply_add<T>(sums[i], from.a[1], from.b[i][2], from.b[i][3]);
    }
  };
  const auto add_up = [&] {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        scores[i][v] += sums[i][v];
        sums[i][v] = 0;
      }
    }
  };
  const int num_steps = shape.width / 32;  // even
  Operands even;
  Operands odd;
  load(even, 0);
#pragma unroll 1
  for (int step = 0; step < num_steps; step += 2) {
    load(odd, step + 1);
    multiply(even);
    if (step + 2 < num_steps) load(even, step + 2);
    multiply(odd);
    if (step % 4 != 0) add_up();
  }
  add_up();
}

/// Keys before limit[h] are seen by the thread's row h of its row tile; others get -inf. Returns
/// the scaled scores in the base-2 domain.
template <int kKeyTiles>
__device__ void mask_scores(float (&scores)[kKeyTiles][4], int first_key, const int (&limit)[2],
                            float scale_log2) {
#pragma unroll
  for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int key = first_key + i * 8 + v % 2;
      scores[i][v] = key < limit[v / 2] ? scores[i][v] * scale_log2 : -INFINITY;
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

/// What a thread knows of its two rows of the scores.
struct RowState {
  float largest[2] = {-INFINITY, -INFINITY};  // over all keys so far, base 2
  float sum[2] = {0, 0};                      // of this thread's weights
};

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

template <class T, class Share>
__device__ void publish_maxima(const Tile<T>& t, const float (&scores)[Share::kKeyTiles][4],
                               const Share& share) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < Share::kKeyTiles; ++i) {
      largest = fmaxf(largest, fmaxf(scores[i][2 * h], scores[i][2 * h + 1]));
    }
    largest = max_over_quad(largest);
    const int row = share.row_tile * kRowTile + h * 8 + t.lane / 4;
    if (t.lane % 4 == 0) t.shared.maxima[share.group * Share::kRows + row] = largest;
  }
}

template <class T, class Share>
__device__ void weigh_block(const Tile<T>& t, const float (&scores)[Share::kKeyTiles][4],
                            const Share& share, RowState& state) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = share.row_tile * kRowTile + h * 8 + t.lane / 4;
    std::byte* const weights = t.shared.weights + row * kWeightRowBytes + t.lane % 4 * 4;
    float largest = state.largest[h];
#pragma unroll
    for (int g = 0; g < Share::kGroups; ++g) {
      largest = fmaxf(largest, t.shared.maxima[g * Share::kRows + row]);
    }
    const float base = largest == -INFINITY ? 0.0F : largest;  // no key seen yet
    const float factor = exp2_approx(state.largest[h] - base);
    state.largest[h] = largest;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Share::kKeyTiles; ++i) {
      const float first = exp2_approx(scores[i][2 * h] - base);
      const float second = exp2_approx(scores[i][2 * h + 1] - base);
      sum += first + second;
      store_pair<T>(weights + chunk_offset(row, share.first_key / kChunk + i), first, second);
    }
    state.sum[h] = state.sum[h] * factor + sum;
    if (share.group == 0 && t.lane % 4 == 0) t.shared.factors[row] = factor;
  }
}

/// out[row tile][column tile][4] of one warp: all rows, kColumnTiles tiles of 8 columns.
template <class T, int kRowTiles, int kColumnTiles, int kBlockKeys>
__device__ void collect_block(const Tile<T>& t, const std::byte* values,
                              float (&out)[kRowTiles][kColumnTiles][4]) {
  const TileShape& shape = t.params.shape;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const float upper = t.shared.factors[m * kRowTile + t.lane / 4];
    const float lower = t.shared.factors[m * kRowTile + 8 + t.lane / 4];
    if (__all_sync(kAllLanes, upper == 1 && lower == 1)) continue;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      out[m][c][0] *= upper;
      out[m][c][1] *= upper;
      out[m][c][2] *= lower;
      out[m][c][3] *= lower;
    }
  }
  // Past the values it computes columns that nobody writes, from whatever else is in the row.
  const int first_tile = t.warp * kColumnTiles;
  const int lane_row = t.lane % 16;
  uint32_t value_at = smem_address(values + lane_row * shape.row_bytes);
  const uint32_t weight_at = smem_address(t.shared.weights + lane_row * kWeightRowBytes);
  int value_offset[kColumnTiles / 2];
#pragma unroll
  for (int c = 0; c < kColumnTiles / 2; ++c) {
    const int chunk = min(first_tile + 2 * c + t.lane / 16, shape.width / kChunk - 1);
    value_offset[c] = chunk_offset(lane_row, chunk);
  }
#pragma unroll 1
  for (int k = 0; k < kBlockKeys; k += 16) {
    const uint32_t step_at = weight_at + chunk_offset(lane_row, k / kChunk + t.lane / 16);
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      load_matrices(a[m], step_at + m * kRowTile * kWeightRowBytes);
    }
    uint32_t b[kColumnTiles / 2][4];
#pragma unroll
    for (int c = 0; c < kColumnTiles / 2; ++c) {
      load_matrices_transposed(b[c], value_at + value_offset[c]);
    }
#pragma unroll
    for (int c = 0; c < kColumnTiles / 2; ++c) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply_add<T>(out[m][2 * c], a[m], b[c][0], b[c][1]);
        multiply_add<T>(out[m][2 * c + 1], a[m], b[c][2], b[c][3]);
      }
    }
    value_at += 16 * shape.row_bytes;
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

template <class T, class Share, int kRowTiles, int kColumnTiles>
__device__ void write_tile(const Tile<T>& t, const Share& share, const RowState& state,
                           const float (&out)[kRowTiles][kColumnTiles][4]) {
  // The sums of all warps' weights.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = sum_over_quad(state.sum[h]);
    const int row = share.row_tile * kRowTile + h * 8 + t.lane / 4;
    if (share.is_idle || t.lane % 4 != 0) continue;
    t.shared.maxima[share.group * Share::kRows + row] = sum;
    if (share.group == 0) t.shared.largest[row] = state.largest[h];
  }
  __syncthreads();
  const AttentionParams& tensors = t.tensors();
  const int rank = t.geometry().kv_lora_rank;
  const auto sum_of = [&](int row) {
    float sum = 0;
    for (int g = 0; g < Share::kGroups; ++g) sum += t.shared.maxima[g * Share::kRows + row];
    return sum;
  };
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m * kRowTile + h * 8 + t.lane / 4;
      if (row >= t.tile.num_rows) continue;
      const float sum = sum_of(row);
      const float inverse = sum == 0 ? 0.0F : 1 / sum;
      const RowPlace at =
          place_of(t.plan, t.geometry().num_heads, t.tile.request, t.tile.row_begin + row);
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
          write_pair(static_cast<T*>(tensors.out) + at.token * tensors.out_token_stride +
                         at.head * tensors.out_head_stride,
                     column, rank, first, second, t.params.paired_out);
        }
      }
      if (t.warp != 0 || t.lane % 4 != 0) continue;
      const float lse =
          sum == 0 ? -INFINITY : (t.shared.largest[row] + log2f(sum)) * std::numbers::ln2_v<float>;
      if (t.tile.partial_begin >= 0) {
        tensors.partial_lse[partial] = lse;
      } else {
        write_lse(tensors, t.plan, at, lse);
      }
    }
  }
}

__device__ inline void wait_for_oldest(int num_stages) {
  if (num_stages == 2) {
    wait_for_copies<0>();
  } else if (num_stages == 3) {
    wait_for_copies<1>();
  } else {
    wait_for_copies<2>();
  }
}

template <class T, int kRowTiles, int kColumnTiles, int kBlockKeys>
__device__ void attend(const Tile<T>& t) {
  using Share = ScoreShare<kRowTiles, kBlockKeys>;
  const TileShape& shape = t.params.shape;
  const int num_blocks = (t.tile.kv_end - t.tile.kv_begin + kBlockKeys - 1) / kBlockKeys;
  const Share share(t.warp);
  KeyLoader<T, kBlockKeys> loader(t);
  t.template load_queries<Share::kRows>();
  for (int i = 1; i < shape.num_stages; ++i) loader.load();

  int limit[2];  // of the thread's rows of the scores
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = share.row_tile * kRowTile + h * 8 + t.lane / 4;
    limit[h] = row < t.tile.num_rows
                   ? min(t.tile.kv_end, visible_keys(t.plan, t.geometry().num_heads, t.tile.request,
                                                     t.tile.row_begin + row))
                   : 0;
  }
  const float scale_log2 = t.plan.sm_scale * std::numbers::log2e_v<float>;
  RowState state;
  float out[kRowTiles][kColumnTiles][4] = {};
  for (int block = 0; block < num_blocks; ++block) {
    wait_for_oldest(shape.num_stages);
    __syncthreads();  // the block is there, and everyone is done with the one before it
    loader.load();

    float scores[Share::kKeyTiles][4];
    if (!share.is_idle) {
      score_block(t, t.stage(block), share.row_tile, share.first_key, scores);
      mask_scores(scores, t.tile.kv_begin + block * kBlockKeys + share.first_key + t.lane % 4 * 2,
                  limit, scale_log2);
      publish_maxima(t, scores, share);
    }
    __syncthreads();  // maxima
    if (!share.is_idle) weigh_block(t, scores, share, state);
    __syncthreads();  // weights and factors
    collect_block<T, kRowTiles, kColumnTiles, kBlockKeys>(t, t.stage(block), out);
  }
  wait_for_copies<0>();
  __syncthreads();  // everyone is done with the maxima
  write_tile(t, share, state, out);
  __syncthreads();  // the next tile overwrites everything
}

}  // namespace mla::cuda::general::tensor_core
