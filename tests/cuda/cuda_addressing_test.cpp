#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "cases/random.hpp"
#include "cuda/cuda_test.hpp"
#include "mla/attention.hpp"
#include "mla/pool.hpp"

// Pools of a GPU beyond 2^31 and 2^32 elements and bytes. They take up to 9 GB of its memory.
namespace mla::cuda {
namespace {

constexpr int32_t kRank = 512, kRope = 64;
constexpr int64_t kWidth = kRank + kRope;

class CudaAddressing : public CudaTest {
 protected:
  static PoolConfig pool_of(int64_t num_pages, int32_t page_size) {
    return {.num_pages = num_pages,
            .page_size = page_size,
            .kv_lora_rank = kRank,
            .qk_rope_head_dim = kRope,
            .dtype = DType::kBFloat16,
            .device = kCuda};
  }
  static test::DeviceArray<BFloat16> random_rows(uint64_t seed, int64_t num_values) {
    std::vector<BFloat16> values(static_cast<size_t>(num_values));
    cases::fill_uniform(cases::row_key(seed, 0, 0), DType::kBFloat16, values.data(), num_values);
    return test::DeviceArray<BFloat16>(kCuda, std::move(values));
  }
  static void append(LatentPool& pool, const std::vector<int64_t>& slots,
                     const test::DeviceArray<BFloat16>& rows) {
    const auto view = rows.view(std::array{std::ssize(slots), kWidth});
    pool.append(0, slots, columns(view, 0, kRank), columns(view, kRank, kRope));
  }
  static std::vector<int64_t> slots_from(int64_t first, int64_t count) {
    std::vector<int64_t> slots(static_cast<size_t>(count));
    std::iota(slots.begin(), slots.end(), first);
    return slots;
  }
  static bool are_equal(const std::vector<BFloat16>& a, const std::vector<BFloat16>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
  }
};

// lightseekorg/tokenspeed PR 501: a writer's slot times its stride in 32 bits, at 1,152 bytes a
// row.
TEST_F(CudaAddressing, RowsPastFourGigabytesLandAtTheirAddress) {
  const PoolConfig config = pool_of(4100000, 1);
  if (!has_room(LatentPool::bytes(config))) GTEST_SKIP() << "too little memory";
  LatentPool pool(config);
  constexpr int64_t kCount = 100;
  const auto rows = random_rows(1, kCount * kWidth);
  for (const int64_t first : {int64_t{1864135 - 50}, int64_t{3728270 - 50}, int64_t{4000000}}) {
    append(pool, slots_from(first, kCount), rows);
    test::DeviceArray<BFloat16> back(kCuda, std::vector<BFloat16>(kCount * kWidth));
    pool.gather(0, slots_from(first, kCount), back.view(std::array{kCount, kWidth}));
    EXPECT_TRUE(are_equal(back.read(), rows.host)) << "from slot " << first;
  }
  // What wrapped around would be among the first rows.
  test::DeviceArray<BFloat16> low(kCuda, std::vector<BFloat16>(1000 * kWidth));
  pool.gather(0, slots_from(271730 - 500, 1000), low.view(std::array{int64_t{1000}, kWidth}));
  EXPECT_TRUE(are_equal(low.read(), std::vector<BFloat16>(1000 * kWidth)));
  const std::array copies = {PageCopy{.from = 4000000, .to = 5},
                             PageCopy{.from = 5, .to = 4050000}};
  pool.copy_pages(copies);
  test::DeviceArray<BFloat16> copied(kCuda, std::vector<BFloat16>(kWidth));
  pool.gather(0, std::array<int64_t, 1>{4050000}, copied.view(std::array{int64_t{1}, kWidth}));
  EXPECT_TRUE(are_equal(copied.read(), {rows.host.begin(), rows.host.begin() + kWidth}));
}

// flashinfer PR 3136 and ROCm/aiter issues 2768, 5765: page times stride in 32 bits, for some head
// counts only.
TEST_F(CudaAddressing, ElementsBeyond32BitsReadTheSameDataForEveryHeadCount) {
  constexpr int32_t kPageSize = 32, kKeys = 3 * kPageSize, kLow = 0, kHigh = 233150;
  const PoolConfig config = pool_of(kHigh + 10, kPageSize);
  if (!has_room(LatentPool::bytes(config) + (size_t{1} << 30))) {
    GTEST_SKIP() << "too little memory";
  }
  LatentPool pool(config);
  const auto rows = random_rows(2, kKeys * kWidth);
  append(pool, slots_from(int64_t{kLow} * kPageSize, kKeys), rows);
  append(pool, slots_from(int64_t{kHigh} * kPageSize, kKeys), rows);
  for (const int32_t heads : {1, 16, 32, 64, 128}) {
    const auto query = random_rows(3, heads * kWidth);
    PagedAttention attention({.geometry = {.num_heads = heads,
                                           .kv_lora_rank = kRank,
                                           .qk_rope_head_dim = kRope,
                                           .page_size = kPageSize,
                                           .dtype = DType::kBFloat16,
                                           .kv_dtype = DType::kBFloat16},
                              .num_pages = pool.total_pages(),
                              .device = kCuda,
                              .limits = {.max_rows = 1, .max_tokens = 1, .max_listed_pages = 3}});
    const auto attend = [&](int32_t first_page) {
      const std::array<int32_t, 2> qo = {0, 1}, kv = {0, 3};
      const std::array<int32_t, 3> pages = {first_page + 2, first_page, first_page + 1};
      const std::array<int32_t, 1> len = {kKeys - 5};
      attention.plan({.qo_indptr = qo, .kv_indptr = kv, .kv_indices = pages, .kv_len = len},
                     {.sm_scale = 0.1F});
      test::DeviceArray<BFloat16> out(kCuda, std::vector<BFloat16>(heads * kRank));
      const auto q = query.view(std::array<int64_t, 3>{1, heads, kWidth});
      attention.run({.q_nope = columns(q, 0, kRank),
                     .q_pe = columns(q, kRank, kRope),
                     .cache = pool.views(0),
                     .out = out.view(std::array<int64_t, 3>{1, heads, kRank})});
      return out.read();
    };
    const std::vector<BFloat16> low = attend(kLow);
    EXPECT_TRUE(are_equal(attend(kHigh), low)) << heads << " heads";
    EXPECT_NE(static_cast<float>(low[0]), 0.0F);
  }
}

}  // namespace
}  // namespace mla::cuda
