#include "cases/attention_case.hpp"

#include <algorithm>
#include <numeric>

#include "mla/error.hpp"

namespace mla::cases {
namespace {

[[noreturn]] void refuse(std::string what, std::string expected, const std::string& got) {
  throw_invalid({.what = std::move(what),
                 .where = "attention case",
                 .expected = std::move(expected),
                 .got = got});
}

void check_at_least(const char* what, int64_t least, int64_t value) {
  if (value >= least) return;
  refuse(what, "at least " + std::to_string(least), std::to_string(value));
}

void check_lengths(const char* what, const std::vector<int32_t>& lengths) {
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] >= 0) continue;
    refuse(std::string(what) + "[" + std::to_string(i) + "]", "0 or more",
           std::to_string(lengths[i]));
  }
}

}  // namespace

int64_t AttentionCase::num_tokens() const {
  return std::accumulate(q_lens.begin(), q_lens.end(), int64_t{0});
}

int64_t AttentionCase::pages_of(int64_t row) const {
  return (int64_t{kv_lens[static_cast<size_t>(row)]} + geometry.page_size - 1) / geometry.page_size;
}

int64_t AttentionCase::pages_needed() const {
  int64_t pages_total = 0;
  for (int64_t row = 0; row < num_rows(); ++row) pages_total += pages_of(row);
  return pages_total;
}

CaseBytes bytes_needed(const AttentionCase& c) {
  constexpr double kSparseAbove = 256.0 * (1 << 20);
  constexpr double kAroundARow = 4096;  // what touching one row of a sparse tensor takes beside it
  CaseBytes bytes;
  const auto add = [&](double rows, double row_bytes, double pad_bytes) {
    const double whole = rows * (row_bytes + pad_bytes);
    bytes.mapped += whole;
    bytes.touched +=
        whole <= kSparseAbove ? whole : rows * (row_bytes + std::min(pad_bytes, 2 * kAroundARow));
  };
  const Geometry& g = c.geometry;
  const auto element = static_cast<double>(size_of(g.dtype));
  const double rank = g.kv_lora_rank;
  const double width = rank + g.qk_rope_head_dim;
  const auto live = static_cast<double>(c.num_tokens());
  const double tokens = c.bucket ? std::max(live, static_cast<double>(c.bucket->num_tokens)) : live;
  const double rows = tokens * g.num_heads;
  add(rows, width * element, 2.0 * c.layout.q_pad * element);
  add(rows, rank * element, c.layout.out_pad * element);
  add(std::max<double>(tokens, g.num_heads), 4, 4.0 * c.layout.lse_pad);
  bytes.touched += rows * (4 * rank + 8) * 4;  // packed copies of the outputs

  const double page = g.page_size * (width + 2.0 * c.layout.row_pad) * element;
  const double page_pad = 2.0 * static_cast<double>(c.layout.page_pad) * element;
  const auto needed = static_cast<double>(c.pages_needed());
  const double pool = static_cast<double>(c.pool_size());
  bytes.mapped += pool * (page + page_pad);
  bytes.touched +=
      pool * (page + page_pad) <= kSparseAbove
          ? pool * (page + page_pad)
          : std::min(pool, 3 * needed) * (page + std::min(page_pad, 4 * kAroundARow) + kAroundARow);
  // Index arrays here and in the plan, and the set that scattered pages are drawn with.
  bytes.touched +=
      16 * (static_cast<double>(c.listed_pages()) + 4 * static_cast<double>(c.num_rows())) +
      64 * needed;
  return bytes;
}

void check_consistent(const AttentionCase& c) {
  if (c.q_lens.size() != c.kv_lens.size()) {
    refuse("kv_lens.size()", std::to_string(c.q_lens.size()) + " = q_lens.size()",
           std::to_string(c.kv_lens.size()));
  }
  check_lengths("q_lens", c.q_lens);
  check_lengths("kv_lens", c.kv_lens);
  check_at_least("geometry.page_size", 1, c.geometry.page_size);
  check_at_least("pool_pages", 0, c.pool_pages);
  check_at_least("spare_entries", 0, c.spare_entries);
  check_at_least("layout.q_pad", 0, c.layout.q_pad);
  check_at_least("layout.out_pad", 0, c.layout.out_pad);
  check_at_least("layout.lse_pad", 0, c.layout.lse_pad);
  check_at_least("layout.row_pad", 0, c.layout.row_pad);
  check_at_least("layout.page_pad", 0, c.layout.page_pad);
  const int64_t needed = c.pages_needed();
  if (!c.pages.empty() && static_cast<int64_t>(c.pages.size()) != needed) {
    refuse("pages.size()", std::to_string(needed) + ", the pages that kv_lens take",
           std::to_string(c.pages.size()));
  }
  if (c.pages.empty() && c.pool_size() < needed) {
    refuse("pool_pages", "at least " + std::to_string(needed) + ", the pages that kv_lens take",
           std::to_string(c.pool_pages));
  }
  if (c.last_page_lens && c.spare_entries > 0) {
    refuse("spare_entries", "0 with last_page_lens, which count every listed page",
           std::to_string(c.spare_entries));
  }
}

}  // namespace mla::cases
