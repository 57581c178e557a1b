#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "mla/error.hpp"
#include "mla/pool.hpp"

namespace mla {
namespace {

PoolConfig small_config() {
  return {.num_layers = 3,
          .num_pages = 5,
          .page_size = 4,
          .kv_lora_rank = 6,
          .qk_rope_head_dim = 2,
          .dtype = DType::kFloat32};
}

// Rows of 8 columns, each value its own.
std::vector<float> numbered_rows(int64_t num_rows, float first = 1) {
  std::vector<float> rows(num_rows * 8);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = first + static_cast<float>(i);
  return rows;
}

TensorView<const float, 2> rows_view(const std::vector<float>& rows, int64_t width = 8) {
  return contiguous_view(rows.data(), std::array{static_cast<int64_t>(rows.size()) / width, width});
}

// 64-byte aligned memory in which every byte is 0xA5.
class PoisonedMemory {
 public:
  explicit PoisonedMemory(size_t size)
      : size_(size), data_(static_cast<std::byte*>(::operator new(size, std::align_val_t{64}))) {
    std::memset(data_, 0xA5, size);
  }
  ~PoisonedMemory() { ::operator delete(data_, std::align_val_t{64}); }
  PoisonedMemory(const PoisonedMemory&) = delete;
  PoisonedMemory& operator=(const PoisonedMemory&) = delete;
  std::span<std::byte> span() const { return {data_, size_}; }
  std::vector<std::byte> copy() const { return {data_, data_ + size_}; }

 private:
  size_t size_;
  std::byte* data_;
};

TEST(LatentPoolUnit, BytesCountEveryLayerPageRowAndTheSink) {
  EXPECT_EQ(LatentPool::bytes(small_config()), size_t{3 * (5 + 1) * 4 * 8 * 4});
  PoolConfig deepseek{.num_layers = 61,
                      .num_pages = 1000,
                      .page_size = 64,
                      .kv_lora_rank = 512,
                      .qk_rope_head_dim = 64};
  EXPECT_EQ(LatentPool::bytes(deepseek), size_t{61} * 1001 * 64 * 576 * 2);
}

TEST(LatentPoolUnit, AppendedRowsAreGatheredFromTheirLayer) {
  LatentPool pool(small_config());
  const auto rows = numbered_rows(4);
  const std::array<int64_t, 4> slots{19, 0, 7, 23};  // 23: the sink's last row
  pool.append(1, slots, columns(rows_view(rows), 0, 6), columns(rows_view(rows), 6, 2));
  std::vector<float> read(rows.size(), -1);
  pool.gather(1, slots, contiguous_view(read.data(), std::array<int64_t, 2>{4, 8}));
  EXPECT_EQ(read, rows);
  pool.gather(0, slots, contiguous_view(read.data(), std::array<int64_t, 2>{4, 8}));
  EXPECT_EQ(read, std::vector<float>(rows.size(), 0)) << "another layer was written";
}

TEST(LatentPoolUnit, LayerViewsAndSplitViewsShowTheRows) {
  LatentPool pool(small_config());
  const auto rows = numbered_rows(1);
  pool.append(2, std::array<int64_t, 1>{9}, columns(rows_view(rows), 0, 6),
              columns(rows_view(rows), 6, 2));
  const Tensor<3> layer = pool.layer(2);
  EXPECT_EQ(layer.shape, (std::array<int64_t, 3>{6, 4, 8}));
  EXPECT_TRUE(std::ranges::equal(rows, std::span(static_cast<float*>(layer.data) + 9 * 8, 8)));
  const LatentViews views = pool.views(2);
  EXPECT_EQ(views.kpe.shape, (std::array<int64_t, 3>{6, 4, 2}));
  EXPECT_EQ(static_cast<const float*>(views.kpe.data)[9 * 8], rows[6]);
}

TEST(LatentPoolUnit, RowsMayHaveAnyStride) {
  LatentPool pool(small_config());
  const auto rows = numbered_rows(6);
  auto ckv = columns(rows_view(rows), 0, 6);
  auto kpe = columns(rows_view(rows), 6, 2);
  ckv.shape[0] = kpe.shape[0] = 2;
  ckv.stride[0] = 16;  // rows 0 and 2
  kpe.stride[0] = 24;  // rows 0 and 3
  pool.append(0, std::array<int64_t, 2>{3, 4}, ckv, kpe);
  std::vector<float> read(24, -1);
  TensorView<float, 2> wide{read.data(), {2, 8}, {12, 1}};
  pool.gather(0, std::array<int64_t, 2>{3, 4}, wide);
  EXPECT_EQ(read[12], rows[16]);
  EXPECT_EQ(read[12 + 6], rows[24 + 6]);
  EXPECT_TRUE(std::all_of(read.begin() + 8, read.begin() + 12, [](float x) { return x == -1; }))
      << "gather wrote between the rows";
}

// Slot -1 is what padded rows get; sgl-project/sglang PR 36003 wrote them to a slot that is read.
TEST(LatentPoolUnit, SkippedRowsChangeNoByte) {
  PoolConfig config = small_config();
  const PoisonedMemory memory(LatentPool::bytes(config));
  config.memory = memory.span();
  LatentPool pool(config);
  const auto rows = numbered_rows(4);
  const std::array<int64_t, 4> slots{5, -1, 6, -1};
  std::vector<std::byte> expected = memory.copy();
  const int64_t layer_begin = 1 * 6 * 4;
  std::memcpy(&expected[(layer_begin + 5) * 32], &rows[0], 32);
  std::memcpy(&expected[(layer_begin + 6) * 32], &rows[16], 32);
  pool.append(1, slots, columns(rows_view(rows), 0, 6), columns(rows_view(rows), 6, 2));
  EXPECT_TRUE(memory.copy() == expected);

  std::vector<float> read(32, -1);
  pool.gather(1, slots, contiguous_view(read.data(), std::array<int64_t, 2>{4, 8}));
  EXPECT_EQ(read[0], rows[0]);
  EXPECT_EQ(read[8], -1) << "a skipped row was read";
}

TEST(LatentPoolUnit, WithoutRopeKpeIsIgnored) {
  PoolConfig config = small_config();
  config.kv_lora_rank = 8;
  config.qk_rope_head_dim = 0;
  LatentPool pool(config);
  const auto rows = numbered_rows(2);
  const std::array<int64_t, 2> slots{2, 1};
  pool.append(0, slots, rows_view(rows), {});
  std::vector<float> read(16);
  pool.gather(0, slots, contiguous_view(read.data(), std::array<int64_t, 2>{2, 8}));
  EXPECT_EQ(read, rows);
}

TEST(LatentPoolUnit, NoRowsNeedNoMemory) {
  LatentPool pool(small_config());
  EXPECT_NO_THROW(pool.append(
      0, {}, contiguous_view(static_cast<const float*>(nullptr), std::array<int64_t, 2>{0, 6}),
      contiguous_view(static_cast<const float*>(nullptr), std::array<int64_t, 2>{0, 2})));
}

TEST(LatentPoolUnit, PagesAreCopiedInEveryLayerAndNowhereElse) {
  PoolConfig config = small_config();
  const PoisonedMemory memory(LatentPool::bytes(config));
  config.memory = memory.span();
  LatentPool pool(config);
  const auto rows = numbered_rows(4);
  for (int32_t layer = 0; layer < 3; ++layer) {
    pool.append(layer, std::array<int64_t, 4>{4, 5, 6, 7}, columns(rows_view(rows), 0, 6),
                columns(rows_view(rows), 6, 2));
  }
  std::vector<std::byte> expected = memory.copy();
  for (int64_t layer = 0; layer < 3; ++layer) {
    std::memcpy(&expected[(layer * 6 + 3) * 128], rows.data(), 128);
    std::memcpy(&expected[(layer * 6 + 0) * 128], rows.data(), 128);
  }
  pool.copy_pages(std::array{PageCopy{1, 3}, PageCopy{3, 0}});  // one after the other
  EXPECT_TRUE(memory.copy() == expected);
}

// lightseekorg/tokenspeed PR 501 and flashinfer-ai/flashinfer PR 3136: slot times row, and page
// times page stride, in 32 bits. The pools are mappings of which only the written rows exist.
TEST(LatentPoolUnit, RowsPastFourGigabytesLandAtTheirAddress) {
  LatentPool pool({.num_layers = 2,
                   .num_pages = 4'000'001,
                   .page_size = 1,
                   .kv_lora_rank = 512,
                   .qk_rope_head_dim = 64});
  std::vector<BFloat16> row(576);
  for (size_t i = 0; i < row.size(); ++i) row[i].bits = static_cast<uint16_t>(i + 1);
  const auto view = contiguous_view(row.data(), std::array<int64_t, 2>{1, 576});
  for (const int64_t slot : {4'000'000, 3'728'300, 4'000'001}) {
    pool.append(1, std::array{slot}, columns(view, 0, 512), columns(view, 512, 64));
    const auto* layer = static_cast<const BFloat16*>(std::as_const(pool).layer(1).data);
    EXPECT_EQ(std::memcmp(layer + slot * 576, row.data(), 576 * 2), 0) << "slot " << slot;
    std::vector<BFloat16> read(576);
    pool.gather(1, std::array{slot}, contiguous_view(read.data(), std::array<int64_t, 2>{1, 576}));
    EXPECT_EQ(std::memcmp(read.data(), row.data(), 576 * 2), 0) << "slot " << slot;
    const int64_t wrapped_bytes = slot * 576 * 2 & 0xffffffff;  // where 32 bits would have put it
    if (wrapped_bytes != slot * 576 * 2) {
      EXPECT_EQ(layer[wrapped_bytes / 2].bits, 0) << slot;
    }
  }
  pool.copy_pages(std::array{PageCopy{4'000'000, 0}});
  EXPECT_EQ(static_cast<const BFloat16*>(pool.layer(1).data)[575].bits, 576);
}

TEST(LatentPoolUnit, MovedPoolsKeepTheirRows) {
  LatentPool pool(small_config());
  const void* data = pool.layer(0).data;
  LatentPool moved(std::move(pool));
  EXPECT_EQ(moved.layer(0).data, data);
  LatentPool assigned(small_config());
  assigned = std::move(moved);
  EXPECT_EQ(assigned.layer(0).data, data);
}

struct BadConfig {
  const char* what;
  void (*spoil)(PoolConfig&);
};

TEST(LatentPoolUnit, BadConfigurationsAreRefusedByName) {
  const BadConfig cases[] = {
      {"config.num_layers", [](PoolConfig& c) { c.num_layers = 0; }},
      {"config.num_pages", [](PoolConfig& c) { c.num_pages = 0; }},
      {"config.num_pages", [](PoolConfig& c) { c.num_pages = INT32_MAX; }},
      {"config.page_size", [](PoolConfig& c) { c.page_size = -1; }},
      {"config.kv_lora_rank", [](PoolConfig& c) { c.kv_lora_rank = 0; }},
      {"config.qk_rope_head_dim", [](PoolConfig& c) { c.qk_rope_head_dim = -1; }},
      {"config.qk_rope_head_dim", [](PoolConfig& c) { c.qk_rope_head_dim = 8187; }},
      {"config.dtype", [](PoolConfig& c) { c.dtype = DType::kInt32; }},
      {"config.device",
       [](PoolConfig& c) {
         c.device = {DeviceKind::kCuda, 1};
       }},
      {"config",
       [](PoolConfig& c) {
         c.num_pages = INT32_MAX - 1;
         c.page_size = INT32_MAX;
       }},
  };
  for (const BadConfig& bad : cases) {
    PoolConfig config = small_config();
    bad.spoil(config);
    try {
      LatentPool pool(config);
      ADD_FAILURE() << bad.what << " was accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.parts().what, bad.what) << error.what();
    }
    EXPECT_THROW(LatentPool::bytes(config), InvalidArgument);
  }
}

TEST(LatentPoolUnit, LentMemoryMustBeLargeEnoughAndAligned) {
  PoolConfig config = small_config();
  const PoisonedMemory memory(LatentPool::bytes(config) + 64);
  config.memory = memory.span().first(LatentPool::bytes(config) - 1);
  EXPECT_THROW(LatentPool{config}, InvalidArgument);
  config.memory = memory.span().subspan(8);
  EXPECT_THROW(LatentPool{config}, InvalidArgument);
  config.memory = {static_cast<std::byte*>(nullptr), LatentPool::bytes(config)};
  EXPECT_THROW(LatentPool{config}, InvalidArgument);
  config.memory = memory.span().first(LatentPool::bytes(config));
  EXPECT_EQ(LatentPool(config).layer(0).data, static_cast<void*>(memory.span().data()));
}

// Every refusal leaves the pool as it was, also where an earlier row could have been written.
TEST(LatentPoolUnit, BadRowsAreRefusedBeforeAnythingIsWritten) {
  PoolConfig config = small_config();
  const PoisonedMemory memory(LatentPool::bytes(config));
  config.memory = memory.span();
  LatentPool pool(config);
  const auto before = memory.copy();
  const auto rows = numbered_rows(2);
  const ConstTensor<2> ckv = columns(rows_view(rows), 0, 6);
  const ConstTensor<2> kpe = columns(rows_view(rows), 6, 2);
  const std::vector<int64_t> slots{0, 1};
  const auto refused = [&](const char* what, int32_t layer, std::vector<int64_t> at,
                           const ConstTensor<2>& ckv_rows, const ConstTensor<2>& kpe_rows) {
    try {
      pool.append(layer, at, ckv_rows, kpe_rows);
      ADD_FAILURE() << what << " was accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.parts().what, what) << error.what();
    }
  };
  const auto with = [](ConstTensor<2> view, auto change) {
    change(view);
    return view;
  };
  using View = ConstTensor<2>;
  refused("layer", 3, slots, ckv, kpe);
  refused("layer", -1, slots, ckv, kpe);
  refused("slots[1]", 0, {0, 24}, ckv, kpe);
  refused("slots[1]", 0, {0, -2}, ckv, kpe);
  refused("ckv.shape", 0, {0}, ckv, kpe);
  refused("ckv.shape", 0, slots, with(ckv, [](View& v) { v.shape[1] = 5; }), kpe);
  refused("kpe.shape", 0, slots, ckv, with(kpe, [](View& v) { v.shape[0] = 3; }));
  refused("ckv.dtype", 0, slots, with(ckv, [](View& v) { v.dtype = DType::kBFloat16; }), kpe);
  refused("kpe.device", 0, slots, ckv,
          with(kpe, [](View& v) { v.device.kind = DeviceKind::kCuda; }));
  refused("ckv.stride[1]", 0, slots, with(ckv, [](View& v) { v.stride[1] = 2; }), kpe);
  refused("kpe.data", 0, slots, ckv, with(kpe, [](View& v) { v.data = nullptr; }));
  EXPECT_THROW(pool.copy_pages(std::array{PageCopy{0, 1}, PageCopy{0, 6}}), InvalidArgument);
  EXPECT_THROW(pool.copy_pages(std::array{PageCopy{0, 1}, PageCopy{-1, 2}}), InvalidArgument);
  std::vector<float> read(8);
  EXPECT_THROW(pool.gather(0, std::array<int64_t, 1>{24},
                           contiguous_view(read.data(), std::array<int64_t, 2>{1, 8})),
               InvalidArgument);
  EXPECT_TRUE(memory.copy() == before);
}

}  // namespace
}  // namespace mla
