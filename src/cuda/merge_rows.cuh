#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/copy_async.cuh"
#include "cuda/numbers.cuh"
#include "cuda/rows.cuh"

// Joins partial results: what merge_partials_kernel does after a kernel, and what a kernel whose
// blocks wait for each other does at its end.
//
// Work is cut into items: a row and 128 of its columns, four a lane. A warp merges neighbouring
// items alone; where there are few, several share one. Parts are added up by eights, and the eights
// in order, so that the bits do not depend on who adds.
//
// What it costs is chains of instructions and memory that is far away; and most of its code runs
// once in a launch, from memory. So there is short code for each of three cases: items shared by
// warps, rows of two parts, which a warp merges four at a time, and other rows.
namespace mla::cuda {

namespace merging {

constexpr int kWarp = 32;
constexpr int kValues = 4;                 // neighbouring columns of a lane
constexpr int kColumns = kWarp * kValues;  // of an item
constexpr int kEight = 8;
constexpr int kPairs = 4;  // rows of two parts that a warp merges together
constexpr uint32_t kAllLanes = 0xffffffff;

// The last merge for which begin_of(merge), which rises from merge to merge, is at most `place`.
// One warp looks at 32 merges at a time, since loads that wait for each other are what it costs.
template <class BeginOf>
__device__ inline uint32_t find_merge(const PlanView& plan, uint32_t place,
                                      const BeginOf& begin_of) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t begin = 0;
  auto count = static_cast<uint32_t>(plan.num_merges);
#pragma unroll 1
  while (count > 1) {
    const uint32_t step = (count + kWarp - 1) / kWarp;
    const uint32_t at = lane * step;
    const bool starts_before =
        at < count && static_cast<uint32_t>(begin_of(plan.merges[begin + at])) <= place;
    const uint32_t last = 31 - __clz(static_cast<int>(__ballot_sync(kAllLanes, starts_before)));
    begin += last * step;
    count = min(step, count - last * step);
  }
  return begin;
}

/// The merge that a row of all merged rows belongs to.
struct FoundMerge {
  plan::Merge merge{};

  __device__ void find(const PlanView& plan, uint32_t row) {
    const uint32_t in_merge = row - static_cast<uint32_t>(merge.rows_before);
    if (in_merge >= static_cast<uint32_t>(merge.num_rows)) {
      const auto row_of = [](const plan::Merge& of) { return of.rows_before; };
      merge = plan.merges[find_merge(plan, row, row_of)];
    }
  }
  __device__ uint32_t end() const {
    return static_cast<uint32_t>(merge.rows_before) + static_cast<uint32_t>(merge.num_rows);
  }
  /// Of its rows of queries x heads.
  __device__ int64_t row_of_request(uint32_t row) const {
    return merge.row_begin + (row - merge.rows_before);
  }
  __device__ int64_t partial_row(uint32_t row, int part) const {
    return merge.partial_begin + (row - merge.rows_before) + int64_t{part} * merge.num_rows;
  }
};

/// What the parts of a row weigh.
struct PartWeights {
  float largest = -INFINITY;  // LSE
  float sum = 0;              // of the weights
  float of_lane = 0;          // the weight of the lane's first part

  __device__ float of(float lse) const { return lse == -INFINITY ? 0.0F : expf(lse - largest); }
  __device__ float natural_lse() const { return sum == 0 ? -INFINITY : largest + logf(sum); }

  /// By kLanes neighbouring lanes. `own`: the LSE of the lane's first part; later_parts(fn) calls
  /// fn with those of its others.
  template <int kLanes, class LaterParts>
  __device__ void weigh(float own, const LaterParts& later_parts) {
    largest = own;
    later_parts([&](float lse) { largest = fmaxf(largest, lse); });
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, mask));
    }
    sum = of_lane = of(own);
    later_parts([&](float lse) { sum += of(lse); });
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, mask);
    }
  }

  /// By the warp, whose lanes have a part each, and every kWarp-th behind it.
  template <class LseOf>
  __device__ void weigh(float own, int num_parts, const LseOf& lse_of) {
    weigh<kWarp>(own, [&](const auto& fn) {
#pragma unroll 1
      for (int p = static_cast<int>(threadIdx.x) % kWarp + kWarp; p < num_parts; p += kWarp) {
        fn(lse_of(p));
      }
    });
  }
};

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

__device__ inline float4 scaled(float4 value, float by) {
  return {value.x * by, value.y * by, value.z * by, value.w * by};
}

__device__ inline void add(float4& sum, float4 value) {
  sum = {sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};
}

}  // namespace merging

/// What the compiler knows of the rows: nothing, or that their rank is a multiple of four.
/// `kRanges`: up to so many items of a row are a piece, merged together. Where that is more than
/// one, pieces of rows of two parts are merged four at a time.
template <bool kIsWholeFours>
struct AnyRows {
  using Out = void;
  static constexpr bool kIsWhole = kIsWholeFours;
  static constexpr int kRanges = 1;
  __device__ static int32_t rank(const Geometry& geometry) { return geometry.kv_lora_rank; }
};

/// The type of their elements in the output, and their rank: no code for others.
template <class OutElement, int kRank>
struct RowsOf {
  using Out = OutElement;
  static constexpr bool kIsWhole = kRank % merging::kValues == 0;
  static constexpr int kRanges = kRank % (4 * merging::kColumns) == 0 ? 4 : 1;
  __device__ static constexpr int32_t rank(const Geometry& /*geometry*/) { return kRank; }
};

/// Shared memory of a warp that merges rows of two parts: of each, its piece's columns.
template <class Rows>
struct MergedPairs {
  float4 columns[2 * merging::kPairs * Rows::kRanges][merging::kWarp];
};

/// Of a block that merges: what the warps of kTeams teams add up.
template <int kTeams>
struct MergedSums {
  float4 of_eight[kTeams][kMaxSplits / merging::kEight][merging::kWarp];
};

namespace merging {

/// Neighbouring items of a row, merged together: `num_ranges` of them.
struct Piece {
  uint32_t row;    // of all merged rows
  int32_t column;  // its first
  int num_ranges;
};

/// Up to kPairs pieces of rows of two parts by a warp alone: two lanes stand for the parts of each,
/// and the columns of all are asked for at once. `piece`: the one that the lane stands for, or the
/// last. `num_items`: of all. `pairs`: the warp's.
template <class Rows>
__device__ inline void merge_pairs(const KernelParams& params, const PlanView& plan,
                                   const FoundMerge& found, const Piece& piece, int num_items,
                                   MergedPairs<Rows>& pairs) {
  const AttentionParams& tensors = params.tensors;
  const int32_t rank = Rows::rank(tensors.geometry);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t partial_row = found.partial_row(piece.row, lane % 2);
  const float lse = tensors.partial_lse[partial_row];
  const int32_t first_token = plan.qo_indptr[found.merge.request];
  const int64_t from = partial_row * rank + piece.column;
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) {
    const float* columns_from =
        tensors.partial_out + __shfl_sync(kAllLanes, from, i) + lane * kValues;
    if (i / 2 * piece.num_ranges >= num_items) continue;
#pragma unroll
    for (int r = 0; r < Rows::kRanges; ++r) {
      if (r >= piece.num_ranges) continue;
      copy_async(shared_address(&pairs.columns[i * piece.num_ranges + r][lane]),
                 columns_from + r * kColumns);
    }
  }
  commit_copies();
  PartWeights weights;
  weights.weigh<2>(lse, [](const auto& /*fn*/) {});
  const RowPlace at =
      place_of(first_token, tensors.geometry.num_heads, found.row_of_request(piece.row));
  const int64_t out_at =
      at.token * tensors.out_token_stride + at.head * tensors.out_head_stride + piece.column;
  wait_for_copies<0>();
#pragma unroll 1
  for (int source = 0; source / 2 * piece.num_ranges < num_items; source += 2) {
    float4 sum[Rows::kRanges] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float weight = __shfl_sync(kAllLanes, weights.of_lane, source + i);
      if (weight == 0) continue;  // such a part may hold anything
#pragma unroll
      for (int r = 0; r < Rows::kRanges; ++r) {
        if (r >= piece.num_ranges) continue;
        add_weighted(sum[r], weight, pairs.columns[(source + i) * piece.num_ranges + r][lane]);
      }
    }
    const float weight = __shfl_sync(kAllLanes, weights.sum, source);
    const float inverse = weight == 0 ? 0.0F : 1 / weight;
    const int64_t to = __shfl_sync(kAllLanes, out_at, source) + lane * kValues;
#pragma unroll
    for (int r = 0; r < Rows::kRanges; ++r) {
      if (r >= piece.num_ranges) continue;
      float4 total{};  // no sum is -0, as in merge_items()
      add(total, sum[r]);
      store_columns<typename Rows::Out>(tensors, to + r * kColumns, scaled(total, inverse),
                                        kValues);
    }
  }
  if (lane / 2 * piece.num_ranges < num_items && lane % 2 == 0 && piece.column == 0) {
    write_lse(tensors, plan, at, weights.natural_lse());
  }
}

/// Who merges what, in pieces of `num_ranges` items: items `begin` to `end` - 1, by a team of
/// warps, of which this is the `member`th. More than one share one item. Of a warp's many only the
/// pieces whose parts, counted over all items, begin before `parts_end`. `found`: the first one's
/// merge, or one near it.
struct Share {
  uint32_t begin, end, parts_end;
  FoundMerge found;
  int num_ranges, team_warps, member;
};

/// Rows differ in their parts, and parts are what a merge costs: each of `num_warps` gets as many.
/// `share`: of the `warp`th of them.
__device__ inline void share_parts(const PlanView& plan, uint32_t ranges, uint32_t warp,
                                   uint32_t num_warps, Share& share) {
  const uint32_t num_parts = static_cast<uint32_t>(plan.num_partial_rows) * ranges;
  const uint32_t parts_of_warp = (num_parts + num_warps - 1) / num_warps;
  const uint32_t begin = warp * parts_of_warp;
  share.begin = share.end;
  share.parts_end = begin + parts_of_warp;
  if (begin >= num_parts) return;
  const auto partial_row_of = [](const plan::Merge& of) { return of.partial_begin; };
  const plan::Merge merge = plan.merges[find_merge(plan, begin / ranges, partial_row_of)];
  const uint32_t in_merge = begin - static_cast<uint32_t>(merge.partial_begin) * ranges;
  const uint32_t parts_of_piece = merge.num_partials * share.num_ranges;
  const uint32_t piece = (in_merge + parts_of_piece - 1) / parts_of_piece;
  share.begin = merge.rows_before * ranges + piece * share.num_ranges;
  share.found = {merge};
}

/// `kRanges`: of a piece at most. `sums`: of the team, where it has several warps; then the warps
/// meet in sync(). `pairs`: of each warp.
template <class Rows, int kRanges, class WaitForParts, class Sync>
__device__ inline void merge_items(const KernelParams& params, const PlanView& plan,
                                   const Share& share, float4 (*sums)[kWarp],
                                   MergedPairs<Rows>* pairs, const WaitForParts& wait_for_parts,
                                   const Sync& sync) {
  constexpr int kParts = kRanges == 1 ? kEight : kEight / 2;  // whose columns are loaded at once
  const AttentionParams& tensors = params.tensors;
  const int32_t rank = Rows::rank(tensors.geometry);
  const uint32_t ranges = (rank + kColumns - 1) / kColumns;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool is_shared = share.team_warps > 1;
  const auto piece_at = [&](uint32_t item) -> Piece {
    const uint32_t row = item / ranges;
    return {.row = row,
            .column = static_cast<int32_t>((item - row * ranges) * kColumns),
            .num_ranges = share.num_ranges};
  };
  bool waits_for_team = is_shared;
  FoundMerge found = share.found;
  uint32_t item = share.begin;
  wait_for_parts();
#pragma unroll 1
  while (item < share.end) {
    const Piece piece = piece_at(item);
    found.find(plan, piece.row);
    const plan::Merge& merge = found.merge;
    const uint32_t parts_before = static_cast<uint32_t>(merge.partial_begin) * ranges +
                                  merge.num_partials * (item - merge.rows_before * ranges);
    if (parts_before >= share.parts_end) break;
    if constexpr (kRanges > 1) {
      if (merge.num_partials == 2) {
        // Up to 2^32 - 1: nothing may be added to it.
        const uint32_t parts_left = share.parts_end - parts_before;
        const uint32_t items_left = parts_left / 2 + parts_left % 2;
        const uint32_t of_pieces = (items_left + share.num_ranges - 1) & -share.num_ranges;
        const uint32_t now = min(min(min(share.end, found.end() * ranges) - item, of_pieces),
                                 static_cast<uint32_t>(kPairs * share.num_ranges));
        const uint32_t lanes_item = threadIdx.x / 2 % kPairs * share.num_ranges;
        if (merge.request < params.num_requests) {
          merge_pairs<Rows>(params, plan, found,
                            piece_at(item + min(lanes_item, now - share.num_ranges)),
                            static_cast<int>(now), pairs[threadIdx.x / kWarp]);
        }
        item += now;
        continue;
      }
    }
    item += piece.num_ranges;
    if (merge.request >= params.num_requests) continue;
    const int32_t first_column = piece.column + lane * kValues;
    const auto columns_left = [&](int r) {
      return r < piece.num_ranges ? rank - first_column - r * kColumns : 0;
    };
    const auto lse_of = [&](int part) {
      return tensors.partial_lse[found.partial_row(piece.row, part)];
    };

    // What is far away is asked for first.
    const float own_lse = lane < merge.num_partials ? lse_of(lane) : -INFINITY;
    const int32_t first_token = plan.qo_indptr[merge.request];
    PartWeights weights;
    float4 total[kRanges] = {};
    const int first_eight = share.member * kEight;
#pragma unroll 1
    for (int eight = first_eight; eight < merge.num_partials; eight += share.team_warps * kEight) {
      const int eight_end = min(eight + kEight, merge.num_partials);
      float4 sum[kRanges] = {};
#pragma unroll 1
      for (int first = eight; first < eight_end; first += kParts) {
        float4 parts[kParts][kRanges];
        const int64_t stride = int64_t{merge.num_rows} * rank;
        const float* from =
            tensors.partial_out + found.partial_row(piece.row, first) * rank + first_column;
#pragma unroll
        for (int i = 0; i < kParts; ++i, from += stride) {
#pragma unroll
          for (int r = 0; r < kRanges; ++r) {
            parts[i][r] = first + i < eight_end
                              ? load_columns<Rows::kIsWhole>(from + r * kColumns, columns_left(r))
                              : float4{};
          }
        }
        if (first == first_eight) weights.weigh(own_lse, merge.num_partials, lse_of);
        float of_lane = weights.of_lane;
        if (first >= kWarp) {
          const int part = first + lane % kParts;
          of_lane = part < eight_end ? weights.of(lse_of(part)) : 0.0F;
        }
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const float weight = __shfl_sync(kAllLanes, of_lane, first % kWarp + i);
          if (weight == 0) continue;  // such a part may hold anything
#pragma unroll
          for (int r = 0; r < kRanges; ++r) add_weighted(sum[r], weight, parts[i][r]);
        }
      }
      if (is_shared) sums[eight / kEight][lane] = sum[0];
#pragma unroll
      for (int r = 0; r < kRanges; ++r) add(total[r], sum[r]);
    }
    if (is_shared) {
      sync();
      waits_for_team = false;
      if (share.member != 0) break;
      total[0] = {};
#pragma unroll 1
      for (int eight = 0; eight * kEight < merge.num_partials; ++eight) {
        add(total[0], sums[eight][lane]);
      }
    }
    const float inverse = weights.sum == 0 ? 0.0F : 1 / weights.sum;
    const RowPlace at =
        place_of(first_token, tensors.geometry.num_heads, found.row_of_request(piece.row));
    const int64_t out_at =
        at.token * tensors.out_token_stride + at.head * tensors.out_head_stride + first_column;
#pragma unroll
    for (int r = 0; r < kRanges; ++r) {
      store_columns<typename Rows::Out>(tensors, out_at + r * kColumns, scaled(total[r], inverse),
                                        columns_left(r));
    }
    if (lane == 0 && piece.column == 0) write_lse(tensors, plan, at, weights.natural_lse());
  }
  if (waits_for_team) sync();  // others of the block have an item
}

}  // namespace merging

/// Merges one block's share of the plan's partial results into out and lse. `Rows`: as above.
/// Called by the block's first kWarps warps. `block` is which of `num_blocks` it is.
/// wait_for_parts() is called once, before the first partial result is read, and returns when all
/// are there; sync() waits for the kWarps warps. `pairs`: of each warp, if Rows::kRanges > 1.
template <class Rows, int kWarps, int kTeams, class WaitForParts, class Sync>
__device__ inline void merge_share(const KernelParams& params, MergedPairs<Rows>* pairs,
                                   MergedSums<kTeams>& sums, uint32_t block, uint32_t num_blocks,
                                   const WaitForParts& wait_for_parts, const Sync& sync) {
  using namespace merging;
  const PlanView plan = params.image.view(params.plan);
  const int32_t rank = Rows::rank(params.tensors.geometry);
  // 32 bits hold every item, and the parts of all: a plan has at most 2^30 merged rows, and where a
  // row has several items each part of one stands for 512 bytes of partial results.
  const uint32_t ranges = (rank + kColumns - 1) / kColumns;
  const uint32_t num_items = static_cast<uint32_t>(plan.num_merged_rows) * ranges;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;

  // A team of warps has one item, or a warp one piece or several neighbouring ones.
  int team_warps = kWarps;
  const auto num_teams = [&] { return num_blocks * (kWarps / team_warps); };
  while (team_warps > 1 && (num_teams() < num_items || kWarps / team_warps > kTeams)) {
    team_warps /= 2;
  }
  int num_ranges = 1;
  while (num_ranges < Rows::kRanges && num_ranges * num_teams() < num_items) num_ranges *= 2;
  const int team = warp / team_warps;  // of the block's
  const uint32_t place = block * (kWarps / team_warps) + team;
  const uint32_t begin = place * num_ranges;
  Share share{.begin = begin,
              .end = min(begin + num_ranges, num_items),
              .parts_end = UINT32_MAX,
              .found = {},
              .num_ranges = num_ranges,
              .team_warps = team_warps,
              .member = warp % team_warps};
  if (num_ranges * num_teams() < num_items) {
    share.end = num_items;
    share_parts(plan, ranges, place, num_teams(), share);
  } else if (share.begin < share.end) {
    share.found.find(plan, share.begin / ranges);
  }
  float4(*sums_of_team)[kWarp] = sums.of_eight[team_warps > 1 ? team : 0];
  if (Rows::kRanges == 1 || team_warps > 1) {
    merge_items<Rows, 1>(params, plan, share, sums_of_team, pairs, wait_for_parts, sync);
  } else {
    // A warp alone, known at compile time: without the code for teams.
    share.team_warps = 1;
    share.member = 0;
    merge_items<Rows, Rows::kRanges>(params, plan, share, sums_of_team, pairs, wait_for_parts,
                                     sync);
  }
}

}  // namespace mla::cuda
