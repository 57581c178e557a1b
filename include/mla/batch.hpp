#pragma once

#include <cstdint>
#include <span>

namespace mla {

/// The requests of one step, as host arrays (B requests, T query tokens). The call that takes it
/// copies what it needs before it returns.
struct Batch {
  std::span<const int32_t> qo_indptr{};   ///< [B + 1], first query token of each request, from 0
  std::span<const int32_t> kv_indptr{};   ///< [B + 1], offsets into kv_indices (pages), from 0
  std::span<const int32_t> kv_indices{};  ///< [>= kv_indptr[B]], page ids in token order
  std::span<const int32_t> kv_len{};      ///< [B] tokens a request may see; or else:
  /// [B] tokens in the last page, 1 to page_size: kv_len is (pages - 1) * page_size + last page's,
  /// and 0 for a request without pages. Give exactly one of the two.
  std::span<const int32_t> kv_last_page_len{};
};

}  // namespace mla
