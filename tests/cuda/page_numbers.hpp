#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "cuda/cuda_test.hpp"
#include "mla/attention.hpp"

namespace mla::cuda {

/// One request: the pages that its queries see.
struct NumberedRow {
  std::vector<int32_t> pages;
  int32_t num_queries = 1;
};

/// A problem whose outputs tell which plan they were made with. A page holds one key, whose values
/// are all the page's number (of 0 to 63, again and again); queries are zeros. So a query attends
/// to the mean of the numbers of its request's pages.
class PageNumbers {
 public:
  static constexpr int32_t kHeads = 4, kRank = 64;

  PageNumbers(DType dtype, int64_t num_pages, int64_t max_tokens)
      : dtype_(dtype),
        num_pages_(num_pages),
        max_tokens_(max_tokens),
        pool_(kCuda, numbers(dtype, num_pages)),
        queries_(kCuda, std::vector<std::byte>(out_bytes())) {
    synchronize(kCuda);
  }

  AttentionConfig config(int64_t max_rows, int64_t max_listed_pages) const {
    return {
        .geometry = {.num_heads = kHeads,
                     .kv_lora_rank = kRank,
                     .qk_rope_head_dim = 0,
                     .page_size = 1,
                     .dtype = dtype_,
                     .kv_dtype = dtype_},
        .num_pages = num_pages_,
        .device = kCuda,
        .limits = {
            .max_rows = max_rows, .max_tokens = max_tokens_, .max_listed_pages = max_listed_pages}};
  }

  static void plan(PagedAttention& attention, const std::vector<NumberedRow>& rows, Stream stream) {
    std::vector<int32_t> qo = {0}, kv = {0}, indices, len;
    for (const NumberedRow& row : rows) {
      qo.push_back(qo.back() + row.num_queries);
      kv.push_back(kv.back() + static_cast<int32_t>(row.pages.size()));
      indices.insert(indices.end(), row.pages.begin(), row.pages.end());
      len.push_back(static_cast<int32_t>(row.pages.size()));
    }
    attention.plan({.qo_indptr = qo, .kv_indptr = kv, .kv_indices = indices, .kv_len = len},
                   {.sm_scale = 1, .causal = false}, stream);
  }

  /// Memory of one run's output, full of NaN.
  DeviceMemory new_output() const {
    DeviceMemory out(kCuda, out_bytes());
    out.fill(0xff);
    synchronize(kCuda);
    return out;
  }
  RunArgs args(const DeviceMemory& out, int64_t num_tokens) const {
    const std::array<int64_t, 3> tokens{num_tokens, kHeads, kRank};
    const std::array<int64_t, 3> pages{num_pages_, 1, kRank};
    return {
        .q_nope = contiguous_view(static_cast<const void*>(queries_.data()), tokens, dtype_, kCuda),
        .cache = split_latent(
            contiguous_view(static_cast<const void*>(pool_.data()), pages, dtype_, kCuda), kRank),
        .out = contiguous_view(out.data(), tokens, dtype_, kCuda)};
  }

  /// Everything queued must be done.
  void expect_means(const DeviceMemory& out, const std::vector<NumberedRow>& rows) const {
    std::vector<std::byte> bytes(out_bytes());
    out.copy_to_host(bytes.data(), bytes.size());
    synchronize(kCuda);
    int64_t token = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      double mean = 0;
      for (const int32_t page : rows[r].pages) mean += page % 64;
      if (!rows[r].pages.empty()) mean /= static_cast<double>(rows[r].pages.size());
      const double allowed = dtype_ == DType::kFloat32 ? 64e-5 : 0.126;  // half a unit of bf16
      for (const int64_t end = token + rows[r].num_queries; token < end; ++token) {
        for (int64_t i = 0; i < kHeads * kRank; ++i) {
          ASSERT_NEAR(value(bytes, token * kHeads * kRank + i), mean, allowed)
              << "request " << r << ", token " << token << ", value " << i;
        }
      }
    }
  }

 private:
  size_t out_bytes() const {
    return static_cast<size_t>(max_tokens_ * kHeads * kRank * size_of(dtype_));
  }
  static void store(std::vector<std::byte>& bytes, DType dtype, int64_t at, float value) {
    if (dtype == DType::kFloat32) {
      reinterpret_cast<float*>(bytes.data())[at] = value;
    } else {
      reinterpret_cast<BFloat16*>(bytes.data())[at] = BFloat16(value);
    }
  }
  float value(const std::vector<std::byte>& bytes, int64_t at) const {
    return dtype_ == DType::kFloat32
               ? reinterpret_cast<const float*>(bytes.data())[at]
               : static_cast<float>(reinterpret_cast<const BFloat16*>(bytes.data())[at]);
  }
  static std::vector<std::byte> numbers(DType dtype, int64_t num_pages) {
    std::vector<std::byte> bytes(static_cast<size_t>(num_pages * kRank * size_of(dtype)));
    for (int64_t i = 0; i < num_pages * kRank; ++i) {
      store(bytes, dtype, i, static_cast<float>(i / kRank % 64));
    }
    return bytes;
  }

  DType dtype_;  // fp32 or bf16
  int64_t num_pages_, max_tokens_;
  test::DeviceArray<std::byte> pool_, queries_;
};

/// Requests of up to three queries and `max_pages` pages, some without either.
inline std::vector<NumberedRow> random_rows(uint64_t seed, int64_t num_rows, int64_t num_pages,
                                            uint64_t max_pages) {
  std::mt19937_64 random(seed);
  std::vector<NumberedRow> rows(static_cast<size_t>(num_rows));
  for (NumberedRow& row : rows) {
    row.num_queries = static_cast<int32_t>(random() % 4);
    row.pages.resize(random() % (max_pages + 1));
    for (int32_t& page : row.pages) {
      page = static_cast<int32_t>(random() % static_cast<uint64_t>(num_pages));
    }
  }
  return rows;
}

inline int64_t num_tokens(const std::vector<NumberedRow>& rows) {
  int64_t total = 0;
  for (const NumberedRow& row : rows) total += row.num_queries;
  return total;
}

}  // namespace mla::cuda
