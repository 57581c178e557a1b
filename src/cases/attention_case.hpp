#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mla/attention.hpp"

namespace mla::cases {

/// Which pages of the pool a request's keys are on.
enum class PageOrder : uint8_t {
  kContiguous,  ///< 0, 1, 2, ... over all requests
  kReversed,    ///< from the pool's last page downwards
  kScattered,   ///< a random choice of the pool's pages, in random order
};

/// What memory that no result may depend on holds: unused slots and pages, padding, query rows
/// beyond the live ones, scratch.
enum class Poison : uint8_t { kNone, kNan, kInf };

enum class DataKind : uint8_t {
  kUniform,   ///< all values uniform in [-1, 1)
  kPeaked,    ///< the key at peak_position has a logit of about +30 for every query
  kConstant,  ///< ckv is 1 but for every 2000th key, where it is 2
  kLarge,     ///< queries 256 times as large: scores of a few hundred
};

/// How the tensors of a case lie in memory. Padding is counted in elements and poisoned.
struct CaseLayout {
  bool joined_q = false;        ///< q_nope and q_pe are columns of one [T, H, rank + rope] tensor
  bool separate_cache = false;  ///< ckv and kpe are tensors of their own, not halves of a pool row
  bool head_major = false;      ///< q, out and lse lie as [H, T, ...]
  bool misaligned = false;      ///< every tensor starts one element after a 64-byte boundary
  int32_t q_pad = 0;            ///< after each query row
  int32_t out_pad = 0;          ///< after each output row
  int32_t lse_pad = 0;          ///< after the innermost run of lse values
  int32_t row_pad = 0;          ///< after each row of the cache
  int64_t page_pad = 0;         ///< after each page
};

/// One problem for PagedAttention, whatever the backend: shapes, lengths, memory, data. Everything
/// random in it follows from its seed.
struct AttentionCase {
  std::string name{};
  Geometry geometry{.num_heads = 16,
                    .kv_lora_rank = 512,
                    .qk_rope_head_dim = 64,
                    .page_size = 64,
                    .dtype = DType::kBFloat16,
                    .kv_dtype = DType::kBFloat16};
  std::vector<int32_t> q_lens{};   ///< [B] query tokens
  std::vector<int32_t> kv_lens{};  ///< [B] cached tokens
  bool causal = false;
  float sm_scale = 0.07216878F;                    ///< 192^-0.5
  std::optional<LseBase> lse = LseBase::kNatural;  ///< none: not wanted

  PageOrder page_order = PageOrder::kScattered;
  std::vector<int32_t> pages{};  ///< page ids of all requests, in turn; replaces the order
  int64_t pool_pages = 0;        ///< 0: three more than are needed
  int32_t spare_entries = 0;     ///< table entries after each request's: -1, 2^31 - 1, 0 in turn
  bool last_page_lens = false;   ///< lengths are handed over as kv_last_page_len

  CaseLayout layout{};
  Poison poison = Poison::kNan;
  DataKind data = DataKind::kUniform;
  int32_t peak_position = 7;
  bool equal_requests = false;  ///< requests of equal lengths hold and ask the same
  bool equal_heads = false;     ///< all heads ask the same
  uint64_t seed = 1;

  SplitPolicy splits{};
  std::optional<Bucket> bucket{};  ///< run with the bucket's tokens
  std::string kernel{};            ///< empty: the first that accepts
  Device device{};                 ///< where it runs

  int64_t num_rows() const { return static_cast<int64_t>(q_lens.size()); }
  int64_t num_tokens() const;
  int64_t pages_of(int64_t row) const;  ///< that the row's keys are on
  int64_t pages_needed() const;
  int64_t pool_size() const { return pool_pages > 0 ? pool_pages : pages_needed() + 3; }
  int64_t listed_pages() const { return pages_needed() + num_rows() * spare_entries; }
};

/// Host memory of a case, scratch apart. Tensors above 256 MiB are mapped sparsely (buffer.hpp).
struct CaseBytes {
  double touched = 0;  ///< that will take room
  double mapped = 0;   ///< of address space
};

/// Upper bounds, with what its check takes; infinite where beyond any machine. Never overflows.
CaseBytes bytes_needed(const AttentionCase& attention_case);

/// Throws InvalidArgument where the case contradicts itself (as many query as key lengths, nothing
/// negative, as many page ids as are needed): what PagedAttention can not see. Whether the library
/// takes the case is not asked here.
void check_consistent(const AttentionCase& attention_case);

}  // namespace mla::cases
