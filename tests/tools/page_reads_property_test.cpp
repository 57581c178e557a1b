#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "mla/page_reads.hpp"

namespace mla::cli {
namespace {

struct Pages {
  std::vector<int32_t> indptr{0}, indices;
};

Pages scattered_pages(const cases::AttentionCase& c, std::mt19937& random) {
  Pages pages;
  for (int64_t row = 0; row < c.num_rows(); ++row) {
    pages.indptr.push_back(pages.indptr.back() + static_cast<int32_t>(c.pages_of(row)));
  }
  pages.indices.resize(static_cast<size_t>(pages.indptr.back()));
  std::iota(pages.indices.begin(), pages.indices.end(), 0);
  std::shuffle(pages.indices.begin(), pages.indices.end(), random);
  return pages;
}

TEST(PageReadsProperty, EveryCachedTokenIsReadOnce) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    cases::AttentionCase c;
    const int32_t page_sizes[] = {1, 3, 16, 24, 64, 100};
    c.geometry.page_size = page_sizes[random() % 6];
    c.kv_lens.resize(1 + random() % 5);
    for (int32_t& kv_len : c.kv_lens) kv_len = static_cast<int32_t>(1 + random() % 500);
    c.q_lens.assign(c.kv_lens.size(), 1);
    const auto blocks = static_cast<int32_t>(1 + random() % 300);
    const Pages pages = scattered_pages(c, random);
    const ReadList list = list_reads(c, pages.indptr, pages.indices, blocks);

    constexpr uint32_t kRowUnits = 576 * 2 / 16;
    std::vector<int> reads(static_cast<size_t>(c.pages_needed()) * c.geometry.page_size);
    ASSERT_EQ(list.runs.size(), static_cast<size_t>(list.num_parts) * list.runs_of_a_part);
    ASSERT_LE(list.runs_of_a_part, 32) << "a lane a run, seed " << seed;
    for (const ReadRun& run : list.runs) {
      ASSERT_EQ(run.begin % kRowUnits, 0U);
      ASSERT_EQ(run.count % kRowUnits, 0U);
      ASSERT_LE(run.count, static_cast<uint32_t>(list.most_units)) << "seed " << seed;
      for (uint32_t i = 0; i < run.count / kRowUnits; ++i) ++reads.at(run.begin / kRowUnits + i);
    }
    for (size_t row = 0; row < c.kv_lens.size(); ++row) {
      for (int32_t token = 0; token < c.kv_lens[row]; ++token) {
        const int32_t page = pages.indices[pages.indptr[row] + token / c.geometry.page_size];
        --reads[static_cast<size_t>(page) * c.geometry.page_size + token % c.geometry.page_size];
      }
    }
    EXPECT_TRUE(std::ranges::all_of(reads, [](int count) { return count == 0; }))
        << "seed " << seed;
  }
}

}  // namespace
}  // namespace mla::cli
