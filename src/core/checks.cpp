#include "core/checks.hpp"

#include <cmath>

#include "core/scratch_layout.hpp"
#include "device/runtime.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

constexpr const char* kCreate = "PagedAttention";
constexpr const char* kPlan = "PagedAttention::plan";

std::string range_text(int64_t low, int64_t high) {
  return std::to_string(low) + " to " + std::to_string(high);
}

void check_range(const char* what, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw_invalid({.what = what,
                 .where = kCreate,
                 .expected = range_text(low, high),
                 .got = std::to_string(value)});
}

bool is_attention_dtype(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

// Page and row strides of one part of the cache: rows must not run into each other, and the last
// element must lie within 2^62 bytes, so that no address computation overflows.
void check_stride(const char* part, int64_t page, int64_t row, int64_t width,
                  const AttentionConfig& config) {
  const auto refuse = [&](const char* field, const std::string& expected, int64_t got) {
    throw_invalid({.what = std::string("strides.") + part + field,
                   .where = kCreate,
                   .expected = expected,
                   .got = std::to_string(got)});
  };
  if (row < width) refuse("_row", "at least " + std::to_string(width) + ", the row's width", row);
  int64_t end = 0;
  if (page < 0 || __builtin_mul_overflow(row, int64_t{config.geometry.page_size} * 4, &end) ||
      end > (int64_t{1} << 61)) {
    refuse("_page", "a page within 2^61 bytes", page);
  }
  if (__builtin_mul_overflow(page, config.num_pages * 4, &end) || end > (int64_t{1} << 61)) {
    refuse("_page", "a pool within 2^61 bytes", page);
  }
}

void check_splits(const SplitPolicy& splits) {
  check_range("splits.fixed_tokens", splits.fixed_tokens, 0, INT32_MAX);
  check_range("splits.forced_count", splits.forced_count, 0, kMaxSplits);
  if (splits.fixed_tokens > 0 && splits.forced_count > 0) {
    throw_invalid({.what = "splits",
                   .where = kCreate,
                   .expected = "fixed_tokens or forced_count, not both",
                   .got = std::to_string(splits.fixed_tokens) + " and " +
                          std::to_string(splits.forced_count)});
  }
}

// offsets[0] == 0 and no entry below the one before it.
void check_indptr(const char* name, std::span<const int32_t> offsets, size_t num_entries) {
  if (offsets.size() != num_entries) {
    throw_invalid({.what = std::string(name) + ".size()",
                   .where = kPlan,
                   .expected = std::to_string(num_entries) + " = rows + 1",
                   .got = std::to_string(offsets.size())});
  }
  if (offsets[0] != 0) {
    throw_invalid({.what = std::string(name) + "[0]",
                   .where = kPlan,
                   .expected = "0",
                   .got = std::to_string(offsets[0])});
  }
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      throw_invalid(
          {.what = std::string(name) + "[" + std::to_string(i) + "]",
           .where = kPlan,
           .expected = "at least " + std::to_string(offsets[i - 1]) + ", the entry before it",
           .got = std::to_string(offsets[i])});
    }
  }
}

void check_capacity(const char* what, int64_t value, int64_t capacity, const char* limit) {
  if (value <= capacity) return;
  throw_invalid({.what = what,
                 .where = kPlan,
                 .expected = "at most " + std::to_string(capacity) + " = " + limit,
                 .got = std::to_string(value)});
}

// Key count of a row from its pages and the length of its last page.
int32_t length_from_last_page(size_t row, int64_t num_pages, int32_t last, int32_t page_size) {
  if (num_pages == 0) return 0;
  if (last < 1 || last > page_size) {
    throw_invalid({.what = "kv_last_page_len[" + std::to_string(row) + "]",
                   .where = kPlan,
                   .expected = range_text(1, page_size) + ", since the row has pages",
                   .got = std::to_string(last)});
  }
  const int64_t length = (num_pages - 1) * page_size + last;
  if (length > kMaxKeys) {
    throw_invalid({.what = "kv_len of row " + std::to_string(row),
                   .where = kPlan,
                   .expected = "at most " + std::to_string(kMaxKeys),
                   .got = std::to_string(length)});
  }
  return static_cast<int32_t>(length);
}

void fill_kv_len(const Batch& batch, int32_t page_size, std::vector<int32_t>& kv_len) {
  const size_t num_rows = batch.qo_indptr.size() - 1;
  const bool from_last_page = batch.kv_len.empty() && !batch.kv_last_page_len.empty();
  if (!batch.kv_len.empty() && !batch.kv_last_page_len.empty()) {
    throw_invalid({.what = "kv_len and kv_last_page_len",
                   .where = kPlan,
                   .expected = "one of the two",
                   .got = "both"});
  }
  const auto& given = from_last_page ? batch.kv_last_page_len : batch.kv_len;
  if (given.size() != num_rows) {
    throw_invalid({.what = from_last_page ? "kv_last_page_len.size()" : "kv_len.size()",
                   .where = kPlan,
                   .expected = std::to_string(num_rows) + " = rows",
                   .got = std::to_string(given.size())});
  }
  kv_len.assign(given.begin(), given.end());
  for (size_t row = 0; row < num_rows; ++row) {
    const int64_t num_pages = int64_t{batch.kv_indptr[row + 1]} - batch.kv_indptr[row];
    if (from_last_page) {
      kv_len[row] = length_from_last_page(row, num_pages, given[row], page_size);
    } else if (given[row] < 0 || given[row] > num_pages * page_size) {
      throw_invalid({.what = "kv_len[" + std::to_string(row) + "]",
                     .where = kPlan,
                     .expected = range_text(0, num_pages * page_size) + ", what its " +
                                 std::to_string(num_pages) + " pages hold",
                     .got = std::to_string(given[row])});
    } else if (given[row] > kMaxKeys) {
      throw_invalid({.what = "kv_len[" + std::to_string(row) + "]",
                     .where = kPlan,
                     .expected = "at most " + std::to_string(kMaxKeys),
                     .got = std::to_string(given[row])});
    }
  }
}

// Page ids that the row's keys are on; entries past them are never looked at.
void check_pages(const Batch& batch, const AttentionConfig& config,
                 std::span<const int32_t> kv_len) {
  const int64_t page_size = config.geometry.page_size;
  const auto last_page = static_cast<uint32_t>(config.num_pages - 1);
  for (size_t row = 0; row < kv_len.size(); ++row) {
    const auto begin = static_cast<size_t>(batch.kv_indptr[row]);
    const auto count = static_cast<size_t>((kv_len[row] + page_size - 1) / page_size);
    const auto ids = batch.kv_indices.subspan(begin, count);
    // The sign bit of id or of last - id is set for an id outside; every vector unit can do this.
    uint32_t signs = 0;
    for (const int32_t id : ids) {
      signs |= static_cast<uint32_t>(id) | (last_page - static_cast<uint32_t>(id));
    }
    if (signs >> 31 == 0) continue;
    for (size_t i = 0; i < count; ++i) {
      if (ids[i] >= 0 && ids[i] < config.num_pages) continue;
      throw_invalid({.what = "kv_indices[" + std::to_string(begin + i) + "]",
                     .where = kPlan,
                     .expected = range_text(0, config.num_pages - 1) + ", the pool's pages",
                     .got = std::to_string(ids[i])});
    }
  }
}

}  // namespace

bool find_fault(const Geometry& geometry, GeometryFault& fault) {
  const auto out_of_range = [&](const char* what, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return false;
    fault = {what, range_text(low, high), std::to_string(value)};
    return true;
  };
  if (out_of_range("num_heads", geometry.num_heads, 1, kMaxHeads) ||
      out_of_range("kv_lora_rank", geometry.kv_lora_rank, 1, kMaxLatentWidth) ||
      out_of_range("qk_rope_head_dim", geometry.qk_rope_head_dim, 0, kMaxLatentWidth - 1) ||
      out_of_range("kv_lora_rank + qk_rope_head_dim", geometry.latent_width(), 1,
                   kMaxLatentWidth) ||
      out_of_range("page_size", geometry.page_size, 1, INT32_MAX)) {
    return true;
  }
  if (!is_attention_dtype(geometry.dtype) || geometry.kv_dtype != geometry.dtype) {
    fault = {"dtype and kv_dtype", "one of the pairs fp32/fp32, bf16/bf16, fp16/fp16",
             std::string(name_of(geometry.dtype)) + "/" + std::string(name_of(geometry.kv_dtype))};
    return true;
  }
  return false;
}

CacheStrides strides_of(const AttentionConfig& config) {
  return config.strides.value_or(pool_strides(config.geometry));
}

Limits limits_of(const AttentionConfig& config) {
  Limits limits = config.limits;
  if (config.bucket) {
    limits.max_rows = config.bucket->num_rows;
    limits.max_tokens = config.bucket->num_tokens;
  }
  return limits;
}

void check_config(const AttentionConfig& config) {
  if (GeometryFault fault; find_fault(config.geometry, fault)) {
    throw_invalid({.what = "geometry." + fault.what,
                   .where = kCreate,
                   .expected = fault.expected,
                   .got = fault.got});
  }
  check_range("num_pages", config.num_pages, 0, kMaxPoolPages);
  if (config.bucket) {  // one without rows or tokens would serve no step
    check_range("bucket.num_rows", config.bucket->num_rows, 1, kMaxRows);
    check_range("bucket.num_tokens", config.bucket->num_tokens, 1, kMaxTokens);
  } else {
    check_range("limits.max_rows", config.limits.max_rows, 0, kMaxRows);
    check_range("limits.max_tokens", config.limits.max_tokens, 0, kMaxTokens);
  }
  check_range("limits.max_listed_pages", config.limits.max_listed_pages, 0, kMaxListedPages);
  check_splits(config.splits);
  const CacheStrides strides = strides_of(config);
  check_stride("ckv", strides.ckv_page, strides.ckv_row, config.geometry.kv_lora_rank, config);
  if (config.geometry.qk_rope_head_dim > 0) {
    check_stride("kpe", strides.kpe_page, strides.kpe_row, config.geometry.qk_rope_head_dim,
                 config);
  }
  const bool immediate = device::runtime_of(config.device, "device", kCreate).is_immediate();
  if (config.capture && immediate) {
    throw_invalid({.what = "capture",
                   .where = kCreate,
                   .expected = "false: the cpu has no graphs to capture into",
                   .got = "true"});
  }
  if (config.capture && !config.bucket) {
    throw_invalid({.what = "bucket",
                   .where = kCreate,
                   .expected = "the rows and tokens of the graph, since capture is asked for",
                   .got = "none"});
  }
}

CheckedBatch check_batch(const Batch& batch, const AttentionConfig& config,
                         std::vector<int32_t>& kv_len) {
  if (batch.qo_indptr.empty()) {
    throw_invalid({.what = "qo_indptr.size()",
                   .where = kPlan,
                   .expected = "rows + 1, so at least 1",
                   .got = "0"});
  }
  const Limits limits = limits_of(config);
  const size_t num_rows = batch.qo_indptr.size() - 1;
  check_capacity("rows = qo_indptr.size() - 1", static_cast<int64_t>(num_rows), limits.max_rows,
                 config.bucket ? "bucket.num_rows" : "limits.max_rows");
  check_indptr("qo_indptr", batch.qo_indptr, num_rows + 1);
  check_indptr("kv_indptr", batch.kv_indptr, num_rows + 1);
  const int64_t num_tokens = batch.qo_indptr.back();
  check_capacity("query tokens = qo_indptr[rows]", num_tokens, limits.max_tokens,
                 config.bucket ? "bucket.num_tokens" : "limits.max_tokens");
  const int64_t num_listed = batch.kv_indptr.back();
  check_capacity("listed pages = kv_indptr[rows]", num_listed, limits.max_listed_pages,
                 "limits.max_listed_pages");
  if (static_cast<int64_t>(batch.kv_indices.size()) < num_listed) {
    throw_invalid({.what = "kv_indices.size()",
                   .where = kPlan,
                   .expected = "at least " + std::to_string(num_listed) + " = kv_indptr[rows]",
                   .got = std::to_string(batch.kv_indices.size())});
  }
  fill_kv_len(batch, config.geometry.page_size, kv_len);
  check_pages(batch, config, kv_len);
  return {.num_rows = static_cast<int64_t>(num_rows),
          .num_tokens = num_tokens,
          .num_listed_pages = num_listed};
}

void check_lent_memory(std::span<const std::byte> lent, size_t needed, const char* what,
                       const char* where) {
  if (lent.size() < needed) {
    throw_invalid({.what = std::string(what) + ".size()",
                   .where = where,
                   .expected = "at least " + std::to_string(needed) + " bytes",
                   .got = std::to_string(lent.size())});
  }
  const auto past = reinterpret_cast<uintptr_t>(lent.data()) % ScratchLayout::kAlignment;
  if (lent.data() != nullptr && past == 0) return;
  throw_invalid(
      {.what = std::string(what) + ".data()",
       .where = where,
       .expected = "an address aligned to " + std::to_string(ScratchLayout::kAlignment) + " bytes",
       .got = lent.data() == nullptr ? "null" : std::to_string(past) + " bytes past one"});
}

void check_lse_base(LseBase base, const char* what, const char* where) {
  if (base == LseBase::kNatural || base == LseBase::kTwo) return;
  throw_invalid({.what = what,
                 .where = where,
                 .expected = "kNatural = 0 or kTwo = 1",
                 .got = std::to_string(static_cast<int>(base))});
}

void check_options(const PlanOptions& options) {
  check_lse_base(options.lse_base, "lse_base", kPlan);
  if (std::isfinite(options.sm_scale) && options.sm_scale > 0) return;
  throw_invalid(
      {.what = "sm_scale",
       .where = kPlan,
       .expected = "a finite value above 0, the scale of the model's original head width"
                   " (it has no default)",
       .got = std::isnan(options.sm_scale) ? "none, or NaN" : std::to_string(options.sm_scale)});
}

}  // namespace mla
