#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/numbers.cuh"
#include "cuda/rows.cuh"

// Joins partial results: what merge_partials_kernel does after a kernel, and what a kernel whose
// blocks wait for each other does at its end.
//
// Work is cut into items: a row and 128 of its columns, four a lane. A warp merges neighbouring
// items alone; where there are few, several share one. Parts are added up by eights, and the eights
// in order, so that the bits do not depend on who adds. The code is short on purpose: most of it
// runs once in a launch, from memory.
namespace mla::cuda {

namespace merging {

constexpr int kWarp = 32;
constexpr int kValues = 4;                 // neighbouring columns of a lane
constexpr int kColumns = kWarp * kValues;  // of an item
constexpr int kEight = 8;
constexpr uint32_t kAllLanes = 0xffffffff;

// The merge that row `row` of all merged rows belongs to: the last whose rows begin at or before
// it. One warp looks at 32 places at a time, since loads that wait for each other are what it
// costs.
__device__ inline uint32_t find_merge(const PlanView& plan, uint32_t row) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t begin = 0;
  auto count = static_cast<uint32_t>(plan.num_merges);
#pragma unroll 1
  while (count > 1) {
    const uint32_t step = (count + kWarp - 1) / kWarp;
    const uint32_t at = lane * step;
    const bool starts_before =
        at < count && static_cast<uint32_t>(plan.merges[begin + at].rows_before) <= row;
    const uint32_t last = 31 - __clz(static_cast<int>(__ballot_sync(kAllLanes, starts_before)));
    begin += last * step;
    count = min(step, count - last * step);
  }
  return begin;
}

/// One row of all merged rows.
struct MergedRow {
  uint32_t index = 0xffffffff;
  plan::Merge merge{};

  __device__ void find(const PlanView& plan, uint32_t row) {
    index = row;
    const uint32_t in_merge = row - static_cast<uint32_t>(merge.rows_before);
    if (in_merge >= static_cast<uint32_t>(merge.num_rows)) {
      merge = plan.merges[find_merge(plan, row)];
    }
  }
  __device__ int64_t row_in_merge() const { return index - merge.rows_before; }
  __device__ int64_t partial_row(int part) const {
    return merge.partial_begin + row_in_merge() + int64_t{part} * merge.num_rows;
  }
};

/// What its parts weigh.
struct PartWeights {
  float largest = -INFINITY;  // LSE
  float sum = 0;              // of the weights
  float of_lane = 0;          // the weight of part `lane`

  __device__ float of(float lse) const { return lse == -INFINITY ? 0.0F : expf(lse - largest); }
  __device__ float natural_lse() const { return sum == 0 ? -INFINITY : largest + logf(sum); }
};

__device__ inline float lse_of_part(const float* partial_lse, const MergedRow& row, int part) {
  return part < row.merge.num_partials ? partial_lse[row.partial_row(part)] : -INFINITY;
}

/// `own`: the LSE of part `lane`.
__device__ inline PartWeights weigh_parts(const float* partial_lse, const MergedRow& row,
                                          float own) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto lse_of = [&](int part) { return lse_of_part(partial_lse, row, part); };
  PartWeights weights{.largest = own};
#pragma unroll 1
  for (int p = lane + kWarp; p < row.merge.num_partials; p += kWarp) {
    weights.largest = fmaxf(weights.largest, lse_of(p));
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    weights.largest = fmaxf(weights.largest, __shfl_xor_sync(kAllLanes, weights.largest, mask));
  }
  weights.sum = weights.of_lane = weights.of(own);
#pragma unroll 1
  for (int p = lane + kWarp; p < row.merge.num_partials; p += kWarp) {
    weights.sum += weights.of(lse_of(p));
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    weights.sum += __shfl_xor_sync(kAllLanes, weights.sum, mask);
  }
  return weights;
}

/// Four columns, or the first `columns` of them and zeros. `kIsWhole`: all four or none.
template <bool kIsWhole>
__device__ float4 load_columns(const float* from, int32_t columns) {
  if constexpr (kIsWhole) return columns > 0 ? *reinterpret_cast<const float4*>(from) : float4{};
  const auto value = [&](int v) { return v < columns ? from[v] : 0.0F; };
  return {value(0), value(1), value(2), value(3)};
}

/// The first `count` of four elements.
template <class T>
__device__ void store_columns(T* to, float4 value, int32_t count) {
  struct alignas(kValues * sizeof(T)) Columns {
    T of[kValues];
  };
  const Columns columns{from_float<T>(value.x), from_float<T>(value.y), from_float<T>(value.z),
                        from_float<T>(value.w)};
  if (count >= kValues && reinterpret_cast<uintptr_t>(to) % sizeof(Columns) == 0) {
    *reinterpret_cast<Columns*>(to) = columns;
    return;
  }
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    if (v < count) to[v] = columns.of[v];
  }
}

template <class Out>
__device__ void store_columns(const AttentionParams& tensors, int64_t at, float4 value,
                              int32_t count) {
  const auto store_as = [&]<class T>(T* out) { store_columns(out + at, value, count); };
  if constexpr (!std::is_void_v<Out>) {
    store_as(static_cast<Out*>(tensors.out));
  } else if (tensors.geometry.dtype == DType::kBFloat16) {
    store_as(static_cast<__nv_bfloat16*>(tensors.out));
  } else if (tensors.geometry.dtype == DType::kFloat16) {
    store_as(static_cast<__half*>(tensors.out));
  } else {
    store_as(static_cast<float*>(tensors.out));
  }
}

__device__ inline void add_weighted(float4& sum, float weight, float4 value) {
  sum.x = fmaf(weight, value.x, sum.x);
  sum.y = fmaf(weight, value.y, sum.y);
  sum.z = fmaf(weight, value.z, sum.z);
  sum.w = fmaf(weight, value.w, sum.w);
}

__device__ inline void add(float4& sum, float4 value) {
  sum = {sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};
}

}  // namespace merging

/// What the compiler knows of the rows: nothing, or that their rank is a multiple of four.
template <bool kIsWholeFours>
struct AnyRows {
  using Out = void;
  static constexpr bool kIsWhole = kIsWholeFours;
  __device__ static int32_t rank(const Geometry& geometry) { return geometry.kv_lora_rank; }
};

/// The type of their elements in the output, and their rank: no code for others.
template <class OutElement, int kRank>
struct RowsOf {
  using Out = OutElement;
  static constexpr bool kIsWhole = kRank % merging::kValues == 0;
  __device__ static constexpr int32_t rank(const Geometry& /*geometry*/) { return kRank; }
};

/// Shared memory of a block that merges. `kTeams`: so many items may be shared by warps.
template <int kTeams>
struct MergeMemory {
  float4 sums[kTeams][kMaxSplits / merging::kEight][merging::kWarp];  // of eights
};

/// Merges one block's share of the plan's partial results into out and lse. `Rows`: as above.
/// Called by the block's first kWarps warps; each does up to kRanges items of a row at a time.
/// `block` is which of `num_blocks` it is. wait_for_parts() comes before the first partial result
/// is read and returns when all are there; sync() waits for the kWarps warps.
template <class Rows, int kWarps, int kRanges, int kTeams, class WaitForParts, class Sync>
__device__ inline void merge_share(const KernelParams& params, MergeMemory<kTeams>& memory,
                                   uint32_t block, uint32_t num_blocks,
                                   const WaitForParts& wait_for_parts, const Sync& sync) {
  using namespace merging;
  constexpr int kParts = kRanges == 1 ? kEight : kEight / 2;  // whose columns are loaded at once
  const PlanView plan = params.image.view(params.plan);
  const AttentionParams& tensors = params.tensors;
  const int32_t rank = Rows::rank(tensors.geometry);
  // 32 bits hold every item: a plan has at most 2^30 merged rows, and where a row has several items
  // each stands for 512 bytes of partial results at least.
  const uint32_t ranges = (rank + kColumns - 1) / kColumns;
  const uint32_t num_items = static_cast<uint32_t>(plan.num_merged_rows) * ranges;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;

  // A team of warps has one item, or a warp neighbouring ones, which share rows.
  int team_warps = kWarps;
  const auto items_at_once = [&] { return num_blocks * (kWarps / team_warps); };
  while (team_warps > 1 && (items_at_once() < num_items || kWarps / team_warps > kTeams)) {
    team_warps /= 2;
  }
  const bool is_shared = team_warps > 1;
  const int member = warp % team_warps;
  const int team = warp / team_warps;  // of the block's
  const uint32_t items_of_team = (num_items + items_at_once() - 1) / items_at_once();
  uint32_t item = (block * (kWarps / team_warps) + team) * items_of_team;
  const uint32_t end = min(item + items_of_team, num_items);
  bool waits_for_team = is_shared;
  MergedRow row;
  if (item < end) row.find(plan, item / ranges);
  wait_for_parts();
#pragma unroll 1
  while (item < end) {
    row.find(plan, item / ranges);
    const uint32_t range = item - row.index * ranges;
    const uint32_t num_ranges = min(min(ranges - range, end - item), uint32_t{kRanges});
    item += num_ranges;
    if (row.merge.request >= params.num_requests) continue;
    const auto first_column = static_cast<int32_t>(range * kColumns) + lane * kValues;
    const auto columns_left = [&](int r) {
      return r < static_cast<int>(num_ranges) ? rank - first_column - r * kColumns : 0;
    };

    // What is far away is asked for first.
    const float own_lse = lse_of_part(tensors.partial_lse, row, lane);
    const int32_t first_token = plan.qo_indptr[row.merge.request];
    PartWeights weights;
    float4 total[kRanges] = {};
#pragma unroll 1
    for (int eight = member * kEight; eight < row.merge.num_partials;
         eight += team_warps * kEight) {
      const int eight_end = min(eight + kEight, row.merge.num_partials);
      float4 sum[kRanges] = {};
#pragma unroll 1
      for (int first = eight; first < eight_end; first += kParts) {
        float4 parts[kParts][kRanges];
        const int64_t stride = int64_t{row.merge.num_rows} * rank;
        const float* from = tensors.partial_out + row.partial_row(first) * rank + first_column;
#pragma unroll
        for (int i = 0; i < kParts; ++i, from += stride) {
#pragma unroll
          for (int r = 0; r < kRanges; ++r) {
            parts[i][r] = first + i < eight_end
                              ? load_columns<Rows::kIsWhole>(from + r * kColumns, columns_left(r))
                              : float4{};
          }
        }
        if (first == member * kEight) weights = weigh_parts(tensors.partial_lse, row, own_lse);
        float of_lane = weights.of_lane;
        if (first >= kWarp) {
          const int part = first + lane % kParts;
          of_lane =
              part < eight_end ? weights.of(tensors.partial_lse[row.partial_row(part)]) : 0.0F;
        }
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const float weight = __shfl_sync(kAllLanes, of_lane, first % kWarp + i);
          if (weight == 0) continue;  // such a part may hold anything
#pragma unroll
          for (int r = 0; r < kRanges; ++r) add_weighted(sum[r], weight, parts[i][r]);
        }
      }
      if (is_shared) memory.sums[team][eight / kEight][lane] = sum[0];
#pragma unroll
      for (int r = 0; r < kRanges; ++r) add(total[r], sum[r]);
    }
    if (is_shared) {
      sync();
      waits_for_team = false;
      if (member != 0) break;
      total[0] = {};
#pragma unroll 1
      for (int eight = 0; eight * kEight < row.merge.num_partials; ++eight) {
        add(total[0], memory.sums[team][eight][lane]);
      }
    }
    const float inverse = weights.sum == 0 ? 0.0F : 1 / weights.sum;
    const RowPlace at =
        place_of(first_token, tensors.geometry.num_heads, row.merge.row_begin + row.row_in_merge());
    const int64_t out_at =
        at.token * tensors.out_token_stride + at.head * tensors.out_head_stride + first_column;
#pragma unroll
    for (int r = 0; r < kRanges; ++r) {
      const float4 value = total[r];
      store_columns<typename Rows::Out>(
          tensors, out_at + r * kColumns,
          {value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse},
          columns_left(r));
    }
    if (lane == 0 && range == 0) write_lse(tensors, plan, at, weights.natural_lse());
  }
  if (waits_for_team) sync();  // others of the block have an item
}

}  // namespace mla::cuda
