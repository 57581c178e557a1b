#pragma once

#include "cuda/general/mma.cuh"
#include "cuda/general/tensor_core/params.cuh"
#include "cuda/numbers.cuh"

// Rows of queries and keys to shared memory.
namespace mla::cuda::general::tensor_core {

template <class T>
struct Tile {
  const Params& params;
  const PlanView& plan;
  const plan::Tile& tile;
  Shared shared;
  int warp = static_cast<int>(threadIdx.x) / kWarp;
  int lane = static_cast<int>(threadIdx.x) % kWarp;

  __device__ const AttentionParams& tensors() const { return params.launch.tensors; }
  __device__ const Geometry& geometry() const { return tensors().geometry; }
  // Copies kRows rows to shared memory; each warp takes kRows / 8, from `mine` of its first lanes.
  template <int kRows>
  __device__ void load_rows(std::byte* rows, const void* ckv, const void* kpe, bool wide,
                            const Source& mine) const {
    constexpr int kRowsOfWarp = kRows / kWarps;
    Source* const sources = shared.sources + warp * kWarps;
    __syncwarp();
    if (lane < kRowsOfWarp) sources[lane] = mine;
    __syncwarp();
    rows += warp * kRowsOfWarp * params.shape.row_bytes;
    if (wide) {
      copy_chunks<kRowsOfWarp>(rows, static_cast<const T*>(ckv), static_cast<const T*>(kpe),
                               sources);
    } else {
      copy_elements<kRowsOfWarp>(rows, static_cast<const T*>(ckv), static_cast<const T*>(kpe),
                                 sources);
    }
  }

  // In units of 16 bytes: 8, 16 or 32 lanes a row, each with the same chunks of all its rows.
  template <int kRows>
  __device__ void copy_chunks(std::byte* rows, const T* ckv, const T* kpe,
                              const Source* sources) const {
    const int chunks = (geometry().kv_lora_rank + geometry().qk_rope_head_dim) / kChunk;
    if (chunks <= 8) {
      copy_chunks_at_once<kRows, 4>(rows, ckv, kpe, sources, chunks);
    } else if (chunks <= 16) {
      copy_chunks_at_once<kRows, 2>(rows, ckv, kpe, sources, chunks);
    } else {
      copy_chunks_at_once<kRows, 1>(rows, ckv, kpe, sources, chunks);
    }
  }

  template <int kRows, int kRowsAtOnce>
  __device__ void copy_chunks_at_once(std::byte* rows, const T* ckv, const T* kpe,
                                      const Source* sources, int chunks) const {
    constexpr int kLanes = kWarp / kRowsAtOnce;  // of a row
    const int rank_chunks = geometry().kv_lora_rank / kChunk;
    const int first_row = lane / kLanes;
    if (kRows < kRowsAtOnce && first_row >= kRows) return;
    const int bank_row = (warp * kRows + first_row) % 8;
    for (int c = lane % kLanes; c < chunks; c += kWarp) {
      const bool is_rope = c >= rank_chunks;
      const int column = (is_rope ? c - rank_chunks : c) * kChunk;
      const int to_chunk = is_rope ? c - rank_chunks + params.shape.rope_column / kChunk : c;
      const T* const from = (is_rope ? kpe : ckv) + column;
      const int64_t* const at = &sources[first_row].ckv_at + (is_rope ? 1 : 0);
      uint32_t to = smem_address(rows) + first_row * params.shape.row_bytes;
#pragma unroll
      for (int row = 0; row < kRows; row += kRowsAtOnce) {
        const int64_t offset = at[2 * row];
        copy_async(to + chunk_offset(bank_row + row, to_chunk), from + offset, offset >= 0);
        to += kRowsAtOnce * params.shape.row_bytes;
      }
    }
  }

  template <int kRows>
  __device__ void copy_elements(std::byte* rows, const T* ckv, const T* kpe,
                                const Source* sources) const {
    constexpr int kAtOnce = 6;  // loads under way
    const TileShape& shape = params.shape;
    const int rank = geometry().kv_lora_rank;
    const int width = rank + geometry().qk_rope_head_dim;
    for (int row = 0; row < kRows; ++row) {
      const Source source = sources[row];
      const T* const ckv_row = ckv + source.ckv_at;
      const T* const kpe_row = kpe + source.kpe_at - rank;
      for (int begin = lane; begin < width; begin += kAtOnce * kWarp) {
        T values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int c = begin + i * kWarp;
          values[i] = from_float<T>(0);
          if (source.ckv_at >= 0 && c < width) values[i] = (c < rank ? ckv_row : kpe_row)[c];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int c = begin + i * kWarp;
          if (c >= width) continue;
          const int to = c < rank ? c : c - rank + shape.rope_column;
          const int offset = chunk_offset(warp * kRows + row, to / kChunk);
          reinterpret_cast<T*>(rows + row * shape.row_bytes + offset)[to % kChunk] = values[i];
        }
      }
    }
  }

  template <int kRows>
  __device__ void load_queries() const {
    const AttentionParams& t = tensors();
    const int row = warp * (kRows / kWarps) + lane;
    Source mine;
    if (lane < kRows / kWarps && row < tile.num_rows) {
      const RowPlace at = place_of(plan, geometry().num_heads, tile.request, tile.row_begin + row);
      mine = {at.token * t.q_nope_token_stride + at.head * t.q_nope_head_stride,
              at.token * t.q_pe_token_stride + at.head * t.q_pe_head_stride};
    }
    load_rows<kRows>(shared.queries, t.q_nope, t.q_pe, params.wide_queries, mine);
  }

  __device__ std::byte* stage(int block) const {
    const TileShape& shape = params.shape;
    return shared.keys + (block % shape.num_stages) * shape.block_keys * shape.row_bytes;
  }
};

/// Copies a tile's blocks of keys, one after the other.
template <class T, int kBlockKeys>
class KeyLoader {
 public:
  __device__ explicit KeyLoader(const Tile<T>& t)
      : t_(t),
        pages_(t.plan.kv_indices + t.plan.kv_indptr[t.tile.request]),
        key_(t.tile.kv_begin + t.warp * kRowsOfWarp + t.lane) {
    look_up();
  }

  /// Copies the next block, if there is one, and ends a group of copies.
  __device__ void load() {
    const AttentionParams& tensors = t_.tensors();
    if (t_.tile.kv_begin + block_ * kBlockKeys < t_.tile.kv_end) {
      t_.template load_rows<kBlockKeys>(t_.stage(block_), tensors.ckv, tensors.kpe,
                                        t_.params.wide_cache, mine_);
      ++block_;
      key_ += kBlockKeys;
      look_up();
    }
    commit_copies();
  }

 private:
  static constexpr int kRowsOfWarp = kBlockKeys / kWarps;

  // Where the lane's row of the next block lies: asked for a block ahead, so that the page table's
  // latency is hidden.
  __device__ void look_up() {
    mine_ = {};
    if (t_.lane >= kRowsOfWarp || key_ >= t_.tile.kv_end) return;
    const CacheStrides& strides = t_.tensors().cache;
    const KeyPlace at = place_of_key(pages_, key_, t_.geometry().page_size);
    mine_ = {at.page * strides.ckv_page + at.slot * strides.ckv_row,
             at.page * strides.kpe_page + at.slot * strides.kpe_row};
  }

  const Tile<T>& t_;
  const int32_t* pages_;
  int32_t key_;
  int block_ = 0;
  Source mine_;
};

}  // namespace mla::cuda::general::tensor_core
