#pragma once

#include "cuda/general/tensor_core/params.cuh"
#include "cuda/numbers.cuh"

// Rows of queries and keys to shared memory, by the value warps: eight lanes a row, so that an
// instruction copies 128 bytes of four rows and its addresses are constants beside the last one's.
namespace mla::cuda::general::tensor_core {

/// Where a row of [ckv | kpe] lies in two tensors, in elements.
struct Source {
  int64_t ckv_at = 0;
  int64_t kpe_at = 0;
  bool is_there = false;  ///< zeros stand for a row that is not
};

/// A thread's view of the tile that its block computes. The tile stays in the plan's image, as all
/// of the plan does: registers are for the output.
template <class Type, class TheTraits>
struct Tile {
  using T = Type;
  using Traits = TheTraits;

  const Params& params;
  const plan::Tile& tile;
  Shared shared;
  int warp;  ///< of its role
  int lane;

  __device__ Tile(const Params& params, const plan::Tile& tile, const Shared& shared)
      : params(params), tile(tile), shared(shared) {
    const uint32_t thread = thread_anew();
    warp = static_cast<int>(thread / kWarp);
    if (warp >= kScoreWarps) warp -= kScoreWarps;
    lane = static_cast<int>(thread % kWarp);
  }
  /// The same with its place in the block read anew (thread_anew).
  __device__ Tile anew() const { return Tile(params, tile, shared); }

  __device__ PlanView plan() const { return params.launch.image.view(params.launch.plan); }
  __device__ const AttentionParams& tensors() const { return params.launch.tensors; }
  __device__ const Geometry& geometry() const { return tensors().geometry; }
  __device__ int num_blocks() const {
    return (tile.kv_end - tile.kv_begin + Traits::kBlockKeys - 1) / Traits::kBlockKeys;
  }
  __device__ int num_stages() const { return params.shape.num_stages[Traits::kRowTiles / 2]; }
  /// The place of the next block of keys in the ring.
  __device__ std::byte* after(std::byte* stage) const {
    const int bytes = Traits::kBlockKeys * params.shape.row_bytes;
    stage += bytes;
    return stage == shared.keys + num_stages() * bytes ? shared.keys : stage;
  }

  __device__ void load_row(std::byte* rows, int row, const void* ckv, const void* kpe, bool wide,
                           const Source& from) const {
    const TileShape& shape = params.shape;
    const int rank = geometry().kv_lora_rank;
    const int rope = geometry().qk_rope_head_dim;
    std::byte* const to = rows + row * shape.row_bytes;
    const auto* const ckv_row = static_cast<const uint16_t*>(ckv) + from.ckv_at;
    const auto* const kpe_row = static_cast<const uint16_t*>(kpe) + from.kpe_at;
    const int rope_chunk = shape.rope_column / kChunk;
    if (wide) {
      copy_chunks(to, row, 0, ckv_row, rank, from.is_there);
      copy_chunks(to, row, rope_chunk, kpe_row, rope, from.is_there);
    } else {
      copy_elements(to, row, 0, ckv_row, rank, from.is_there);
      copy_elements(to, row, rope_chunk, kpe_row, rope, from.is_there);
    }
  }

  __device__ void copy_chunks(std::byte* to_row, int row, int to_chunk, const uint16_t* from,
                              int columns, bool is_there) const {
    const int first = lane % kChunk;
    uint32_t to = shared_address(to_row) + chunk_offset(row, to_chunk + first);
    from += first * kChunk;
#pragma unroll 4
    for (int groups = columns / kGroupColumns; groups > 0; --groups) {
      copy_async(to, from, is_there);
      to += kGroupColumns * sizeof(T);
      from += kGroupColumns;
    }
    if (first * kChunk < columns % kGroupColumns) copy_async(to, from, is_there);
  }

  // The last chunk is filled with zeros.
  __device__ void copy_elements(std::byte* to_row, int row, int to_chunk, const uint16_t* from,
                                int columns, bool is_there) const {
    for (int column = lane % kChunk * kChunk; column < columns; column += kGroupColumns) {
      uint32_t pairs[kChunk / 2];
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) {
        const int at = column + 2 * i;
        const uint32_t first = is_there && at < columns ? from[at] : 0;
        const uint32_t second = is_there && at + 1 < columns ? from[at + 1] : 0;
        pairs[i] = first | second << 16;
      }
      *reinterpret_cast<uint4*>(to_row + chunk_offset(row, to_chunk + column / kChunk)) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

  // Each warp takes the rows from warp * kRows / 8 on; its lane i knows where row i of them lies.
  template <int kRows>
  __device__ void load_rows(std::byte* rows, const void* ckv, const void* kpe, bool wide,
                            const Source& of_lane) const {
    constexpr int kRowsOfWarp = kRows / kValueWarps;
    constexpr int kRowsAtOnce = kWarp / kChunk;
#pragma unroll 1
    for (int i = 0; i < kRowsOfWarp; i += kRowsAtOnce) {
      const int mine = i + lane / kChunk;
      const Source from = {__shfl_sync(kAllLanes, of_lane.ckv_at, mine),
                           __shfl_sync(kAllLanes, of_lane.kpe_at, mine),
                           __shfl_sync(kAllLanes, int{of_lane.is_there}, mine) != 0};
      if (kRowsOfWarp < kRowsAtOnce && mine >= kRowsOfWarp) continue;
      load_row(rows, warp * kRowsOfWarp + mine, ckv, kpe, wide, from);
    }
  }

  __device__ void load_queries() const {
    const AttentionParams& t = tensors();
    const int row = warp * (Traits::kRows / kValueWarps) + lane;
    Source from;
    if (row < tile.num_rows) {
      const RowPlace at =
          place_of(plan(), geometry().num_heads, tile.request, tile.row_begin + row);
      from = {at.token * t.q_nope_token_stride + at.head * t.q_nope_head_stride,
              at.token * t.q_pe_token_stride + at.head * t.q_pe_head_stride, true};
    }
    load_rows<Traits::kRows>(shared.queries, t.q_nope, t.q_pe, params.wide_queries, from);
  }
};

/// The 16-byte chunk of narrow rows that a lane copies, the same in every row that it has a part
/// in: where it lies in the cache and where in a row of shared memory. 16 lanes take a row.
class ChunkOfLane {
 public:
  /// Whether rows have as few chunks as there are lanes.
  __device__ static bool serves(const Geometry& geometry) {
    return geometry.kv_lora_rank + geometry.qk_rope_head_dim <= kLanes * kChunk;
  }

  __device__ ChunkOfLane(const Params& params, uint32_t lane) {
    const AttentionParams& tensors = params.launch.tensors;
    const CacheStrides& strides = tensors.cache;
    const int value_chunks = tensors.geometry.kv_lora_rank / kChunk;
    const int chunks = value_chunks + tensors.geometry.qk_rope_head_dim / kChunk;
    row_ = lane / kLanes;
    const auto chunk = static_cast<int>(lane % kLanes);
    copies_ = chunk < chunks;
    const bool is_value = chunk < value_chunks;
    const int in_tensor = is_value ? chunk : chunk - value_chunks;
    chunk_ = is_value ? chunk : params.shape.rope_column / kChunk + in_tensor;
    from_ = static_cast<const uint16_t*>(is_value ? tensors.ckv : tensors.kpe) + in_tensor * kChunk;
    page_stride_ = is_value ? strides.ckv_page : strides.kpe_page;
    row_stride_ = is_value ? strides.ckv_row : strides.kpe_row;
  }

  /// Copies rows of one warp, of which lane i knows where row i lies and whether it is there.
  template <int kRows>
  __device__ void copy_rows(std::byte* rows, uint32_t first_row, uint32_t row_bytes, int32_t page,
                            int32_t slot, bool is_there) const {
    constexpr int kTimes = kRows / kRowsAtOnce;
    const uint32_t there = __ballot_sync(kAllLanes, is_there) >> row_;
    uint32_t pages[kTimes];
    uint32_t slots[kTimes];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      pages[i] = __shfl_sync(kAllLanes, page, i * kRowsAtOnce + row_);
      slots[i] = __shfl_sync(kAllLanes, slot, i * kRowsAtOnce + row_);
    }
    if (!copies_) return;
    uint32_t row = first_row + row_;
    uint32_t to = shared_address(rows) + row * row_bytes;
#pragma unroll
    for (int i = 0; i < kTimes; ++i, row += kRowsAtOnce, to += kRowsAtOnce * row_bytes) {
      copy_async(to + chunk_offset(row, chunk_),
                 from_ + pages[i] * page_stride_ + slots[i] * row_stride_,
                 (there >> i * kRowsAtOnce & 1) != 0);
    }
  }

 private:
  static constexpr int kLanes = 16;
  static constexpr int kRowsAtOnce = kWarp / kLanes;

  const uint16_t* from_;  // of page 0, row 0
  int64_t page_stride_;   // in elements
  int64_t row_stride_;
  uint32_t row_;  // of those copied at once
  int chunk_;     // of the row in shared memory
  bool copies_;
};

/// Copies a tile's blocks of keys, one after the other.
template <class Tile>
class KeyLoader {
 public:
  __device__ explicit KeyLoader(const Tile& t)
      : t_(t),
        pages_(t.plan().kv_indices + t.plan().kv_indptr[t.tile.request]),
        key_(t.tile.kv_begin + t.warp * kRowsOfWarp + t.lane),
        end_(t.tile.kv_end),
        stage_(t.shared.keys),
        chunk_(t.params, t.lane),
        is_narrow_(kMayBeNarrow && t.params.wide_cache && ChunkOfLane::serves(t.geometry())) {
    look_up();
  }

  /// Copies the next block, if there is one, and ends a group of copies.
  __device__ void load() {
    const Tile t = kMayBeNarrow ? t_ : t_.anew();
    if (key_ - t.warp * kRowsOfWarp - t.lane < end_) {
      if (is_narrow_) {
        chunk_.copy_rows<kRowsOfWarp>(stage_, t.warp * kRowsOfWarp, t.params.shape.row_bytes, page_,
                                      slot_, key_ < end_);
      } else {
        const AttentionParams& tensors = t.tensors();
        const CacheStrides& strides = tensors.cache;
        t.template load_rows<kBlockKeys>(
            stage_, tensors.ckv, tensors.kpe, t.params.wide_cache,
            {page_ * strides.ckv_page + slot_ * strides.ckv_row,
             page_ * strides.kpe_page + slot_ * strides.kpe_row, key_ < end_});
      }
      stage_ = t.after(stage_);
      key_ += kBlockKeys;
      look_up();
    }
    commit_copies();
  }

 private:
  static constexpr int kBlockKeys = Tile::Traits::kBlockKeys;
  static constexpr int kRowsOfWarp = kBlockKeys / kValueWarps;
  // Outputs of up to 128 columns leave room in the registers for ChunkOfLane.
  static constexpr bool kMayBeNarrow = Tile::Traits::kColumnTiles == 2;

  // Where the lane's row of the next block lies: asked for a block ahead, so that the page table's
  // latency is hidden.
  __device__ void look_up() {
    if (key_ >= end_) return;
    const int32_t page = t_.params.by_page_size(key_);
    page_ = pages_[page];
    slot_ = key_ - page * t_.geometry().page_size;
  }

  const Tile& t_;
  const int32_t* pages_;
  int32_t key_;  // the lane's of the next block
  int32_t end_;
  std::byte* stage_;
  ChunkOfLane chunk_;
  bool is_narrow_;
  int32_t page_ = 0;
  int32_t slot_ = 0;
};

}  // namespace mla::cuda::general::tensor_core
