#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cases/random.hpp"
#include "cuda/cuda_test.hpp"
#include "device/operations.hpp"
#include "device/runtime.hpp"
#include "mla/error.hpp"
#include "mla/merge.hpp"
#include "mla/pool.hpp"

// What a GPU does around attention, against what the CPU does with the same input.
namespace mla::cuda {
namespace {

using Bytes = std::vector<std::byte>;
using test::DeviceArray;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Bytes random_bytes(uint64_t seed, int64_t size) {
  std::mt19937_64 random(seed);
  Bytes bytes(static_cast<size_t>(size));
  for (size_t i = 0; i < bytes.size(); i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(&bytes[i], &word, std::min(sizeof(word), bytes.size() - i));
  }
  return bytes;
}

struct RowShape {
  DType dtype;
  int32_t rank, rope;
  int32_t gap;     // elements between rows of a tensor
  int32_t offset;  // elements before its first row

  int64_t width() const { return int64_t{rank} + rope; }
  int64_t stride() const { return width() + gap; }
};

// Rows of 2, 6 and 1152 bytes and more, aligned to 2, 4 and 16 bytes.
constexpr RowShape kRowShapes[] = {
    {DType::kBFloat16, 1, 0, 0, 0},    {DType::kFloat16, 2, 1, 0, 1},
    {DType::kFloat32, 3, 2, 1, 0},     {DType::kBFloat16, 64, 16, 2, 2},
    {DType::kBFloat16, 512, 64, 0, 0}, {DType::kBFloat16, 512, 64, 1, 1},
    {DType::kFloat32, 512, 64, 4, 0},  {DType::kFloat16, 512, 0, 8, 8},
};

// [num_rows, width] from `base` on.
template <class Void>
TensorView<Void, 2> rows_at(const RowShape& shape, Void* base, int64_t num_rows, Device device) {
  auto* const at = reinterpret_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(base))) +
                   shape.offset * size_of(shape.dtype);
  return {at, {num_rows, shape.width()}, {shape.stride(), 1}, device, shape.dtype};
}

// The same pool twice.
struct Twins {
  explicit Twins(const PoolConfig& config) : cpu(config), gpu(on_gpu(config)) {}
  LatentPool cpu, gpu;

  static PoolConfig on_gpu(PoolConfig config) {
    config.device = kCuda;
    return config;
  }
  static Bytes bytes_of(const LatentPool& pool) {
    const size_t size = LatentPool::bytes(pool.config());
    Bytes bytes(size);
    device::Runtime& runtime = device::runtime_of(pool.config().device);
    runtime.copy_to_host(bytes.data(), pool.layer(0).data, size, {});
    runtime.synchronize({});
    return bytes;
  }
  void fill(const Bytes& bytes) {
    for (LatentPool* pool : {&cpu, &gpu}) {
      device::Runtime& runtime = device::runtime_of(pool->config().device);
      runtime.copy_to_device(pool->layer(0).data, bytes.data(), bytes.size(), {});
      runtime.synchronize({});
    }
  }
  void expect_equal() const { EXPECT_TRUE(bytes_of(cpu) == bytes_of(gpu)); }
};

PoolConfig pool_of(const RowShape& shape, int64_t num_pages, int32_t page_size,
                   int32_t num_layers) {
  return {.num_layers = num_layers,
          .num_pages = num_pages,
          .page_size = page_size,
          .kv_lora_rank = shape.rank,
          .qk_rope_head_dim = shape.rope,
          .dtype = shape.dtype};
}

class CudaPool : public CudaTest {
 protected:
  static constexpr int64_t kSlots = 6000;

  // More than one launch takes (2048), each at most once, some of them -1.
  static std::vector<int64_t> scattered_slots(uint64_t seed) {
    std::vector<int64_t> slots(kSlots);
    std::iota(slots.begin(), slots.end(), 0);
    std::ranges::shuffle(slots, std::mt19937_64(seed));
    slots.resize(5000);
    for (size_t i = 0; i < slots.size(); i += 7) slots[i] = -1;
    return slots;
  }
};

TEST_F(CudaPool, AppendedRowsAreThoseOfTheCpuBitForBit) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(testing::Message() << "width " << shape.width() << ", gap " << shape.gap);
    Twins pools(pool_of(shape, kSlots / 8 - 1, 8, 2));
    const std::vector<int64_t> slots = scattered_slots(1);
    const DeviceArray<int64_t> slots_on_gpu(kCuda, slots);
    const auto num_rows = std::ssize(slots);
    const DeviceArray<std::byte> rows(
        kCuda, random_bytes(2, (shape.offset + num_rows * shape.stride()) * size_of(shape.dtype)));
    const auto append = [&](LatentPool& pool, int32_t layer, const void* data, bool on_device) {
      const ConstTensor<2> view = rows_at(shape, data, num_rows, pool.config().device);
      const ConstTensor<2> ckv = columns(view, 0, shape.rank);
      const ConstTensor<2> kpe = columns(view, shape.rank, shape.rope);
      if (on_device) {
        pool.append_at(layer, slots_on_gpu.view(std::array<int64_t, 1>{num_rows}), ckv, kpe);
      } else {
        pool.append(layer, slots, ckv, kpe);
      }
    };
    for (int32_t layer = 0; layer < 2; ++layer) {
      append(pools.cpu, layer, rows.host.data(), false);
      append(pools.gpu, layer, rows.data(), layer == 1);
    }
    pools.expect_equal();
  }
}

TEST_F(CudaPool, GatheredRowsAreThoseOfTheCpuBitForBit) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(testing::Message() << "width " << shape.width() << ", gap " << shape.gap);
    Twins pools(pool_of(shape, kSlots / 8 - 1, 8, 2));
    pools.fill(random_bytes(3, static_cast<int64_t>(LatentPool::bytes(pools.cpu.config()))));
    const std::vector<int64_t> slots = scattered_slots(4);
    const auto num_rows = std::ssize(slots);
    // Gaps, and rows of slot -1, keep what they hold.
    DeviceArray<std::byte> gpu_rows(
        kCuda, random_bytes(5, (shape.offset + num_rows * shape.stride()) * size_of(shape.dtype)));
    Bytes cpu_rows = gpu_rows.host;
    pools.cpu.gather(1, slots,
                     rows_at(shape, static_cast<void*>(cpu_rows.data()), num_rows, Device{}));
    pools.gpu.gather(1, slots,
                     rows_at(shape, static_cast<void*>(gpu_rows.data()), num_rows, kCuda));
    EXPECT_TRUE(gpu_rows.read() == cpu_rows);
  }
}

// One after the other, although a launch makes many: chains, swaps and copies onto themselves.
TEST_F(CudaPool, CopiedPagesAreThoseOfTheCpuBitForBit) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(testing::Message() << "width " << shape.width());
    for (const int32_t page_size : {1, 3, 64}) {
      const int32_t half = page_size == 64 ? 60 : 1200;
      Twins pools(pool_of(shape, 2 * half, page_size, 3));
      pools.fill(random_bytes(6, static_cast<int64_t>(LatentPool::bytes(pools.cpu.config()))));
      std::mt19937_64 random(7);
      std::vector<PageCopy> copies = {{0, 1}, {1, 2}, {2, 0}, {5, 5}, {0, 3}, {1, 3}, {3, 4}};
      for (int32_t i = 0; i < half; ++i) copies.push_back({i, half + i});  // more than a launch
      for (int i = 0; i < 60; ++i) {
        copies.push_back(
            {static_cast<int32_t>(random() % 20), static_cast<int32_t>(random() % 20)});
      }
      pools.cpu.copy_pages(copies);
      pools.gpu.copy_pages(copies);
      pools.expect_equal();
    }
  }
}

TEST_F(CudaPool, CapturedAppendReadsItsSlotsAnewAtEachReplay) {
  const RowShape shape = kRowShapes[4];
  Twins pools(pool_of(shape, 100, 4, 1));
  device::Runtime& runtime = device::runtime_of(kCuda);
  const DeviceStream stream(kCuda);
  constexpr int64_t kRows = 32;
  DeviceArray<int64_t> slots(kCuda, std::vector<int64_t>(kRows, -1));
  DeviceArray<std::byte> rows(kCuda, random_bytes(8, kRows * shape.width() * 2));
  synchronize(kCuda);
  const auto halves = [&](const void* data, Device device) {
    const ConstTensor<2> view = rows_at(shape, data, kRows, device);
    return std::pair(columns(view, 0, shape.rank), columns(view, shape.rank, shape.rope));
  };
  const auto [ckv, kpe] = halves(rows.data(), kCuda);
  runtime.begin_capture(stream);
  pools.gpu.append_at(0, slots.view(std::array<int64_t, 1>{kRows}), ckv, kpe, stream);
  const device::Graph graph = runtime.end_capture(stream);
  std::mt19937_64 random(9);
  std::vector<int64_t> places(400);
  std::iota(places.begin(), places.end(), 0);
  for (uint64_t round = 0; round < 20; ++round) {
    std::ranges::shuffle(places, random);
    std::copy_n(places.begin(), kRows, slots.host.begin());
    slots.host[round % kRows] = -1;
    slots.host[(round + 1) % kRows] = -1;
    rows.host = random_bytes(10 + round, std::ssize(rows.host));
    const auto [cpu_ckv, cpu_kpe] = halves(rows.host.data(), Device{});
    pools.cpu.append(0, slots.host, cpu_ckv, cpu_kpe);
    slots.host[(round + 1) % kRows] = 100000;  // outside of the pool: skipped, too
    slots.upload(stream);
    rows.upload(stream);
    runtime.replay(graph, stream);
    stream.synchronize();
  }
  pools.expect_equal();
  runtime.destroy_graph(graph);
}

class CudaSelect : public CudaTest {};

TEST_F(CudaSelect, LastRowsAreThoseOfTheCpuAndZerosWithoutQueries) {
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt32, DType::kInt64}) {
    for (const int64_t width : {1, 3, 64, 7168}) {
      for (const int64_t num_rows : {1, 7, 1000}) {
        SCOPED_TRACE(testing::Message()
                     << name_of(dtype) << " [" << num_rows << ", " << width << "]");
        std::vector<int32_t> indptr = {0};
        for (int64_t i = 0; i < num_rows; ++i) {
          indptr.push_back(indptr.back() + static_cast<int32_t>(random() % 3));
        }
        const int64_t num_tokens = indptr.back(), stride = width + 1;
        const int64_t item = size_of(dtype);
        const DeviceArray<int32_t> indptr_on_gpu(kCuda, indptr);
        const DeviceArray<std::byte> hidden(kCuda,
                                            random_bytes(2, (num_tokens * stride + 1) * item));
        DeviceArray<std::byte> out(kCuda, random_bytes(3, num_rows * stride * item));
        Bytes cpu_out = out.host;
        const auto select = [&](Device device, const int32_t* qo, const void* from, void* to) {
          device::runtime_of(device).operations().select_last_rows(
              qo, {from, {num_tokens, width}, {stride, 1}, device, dtype},
              {to, {num_rows, width}, {stride, 1}, device, dtype}, {});
        };
        select(Device{}, indptr.data(), hidden.host.data(), cpu_out.data());
        select(kCuda, indptr_on_gpu.data(), hidden.data(), out.data());
        EXPECT_TRUE(out.read() == cpu_out);
      }
    }
  }
}

// Partial states [T, H, D] of mixed dtypes, on the CPU and on the GPU.
struct Partials {
  static constexpr int64_t kTokens = 5, kHeads = 3;
  int64_t width;
  std::vector<DType> dtypes;
  std::vector<DeviceArray<std::byte>> outs;
  std::vector<DeviceArray<float>> lses;

  Partials(uint64_t seed, int64_t columns, const std::vector<DType>& types)
      : width(columns), dtypes(types) {
    std::mt19937_64 random(seed);
    for (size_t i = 0; i < types.size(); ++i) {
      const int64_t count = kTokens * kHeads * width;
      Bytes values(static_cast<size_t>(count * size_of(types[i])));
      cases::fill_uniform(cases::row_key(seed, i, 0), types[i], values.data(), count);
      std::vector<float> lse(kTokens * kHeads);
      for (float& value : lse) {
        value = static_cast<float>(random() % 2000) / 100 - 10;
        if (random() % 4 == 0) value = -kInf;
      }
      lse[0] = -kInf;  // a row that is empty in every state
      outs.emplace_back(kCuda, std::move(values));
      lses.emplace_back(kCuda, std::move(lse));
    }
    synchronize(kCuda);
  }
  std::vector<PartialState> states(bool on_gpu, LseBase base) const {
    std::vector<PartialState> list;
    for (size_t i = 0; i < outs.size(); ++i) {
      const Device device = on_gpu ? kCuda : Device{};
      const void* out = on_gpu ? outs[i].data() : outs[i].host.data();
      const float* lse = on_gpu ? lses[i].data() : lses[i].host.data();
      list.push_back({contiguous_view(out, std::array{kTokens, kHeads, width}, dtypes[i], device),
                      contiguous_view(lse, std::array{kTokens, kHeads}, device), base});
    }
    return list;
  }
};

std::vector<float> as_floats(const Bytes& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / static_cast<size_t>(size_of(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kBFloat16) {
      values[i] = static_cast<float>(reinterpret_cast<const BFloat16*>(bytes.data())[i]);
    } else if (dtype == DType::kFloat16) {
      values[i] = static_cast<float>(reinterpret_cast<const Float16*>(bytes.data())[i]);
    } else {
      values[i] = reinterpret_cast<const float*>(bytes.data())[i];
    }
  }
  return values;
}

// Both compute in double; exp may differ in its last bit, which rarely shows after rounding.
void expect_close(const std::vector<float>& got, const std::vector<float>& wanted, double unit) {
  ASSERT_EQ(got.size(), wanted.size());
  size_t num_different = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(wanted[i]) || std::isinf(wanted[i])) {
      ASSERT_EQ(std::isnan(got[i]), std::isnan(wanted[i])) << i;
      if (std::isinf(wanted[i])) {
        ASSERT_EQ(got[i], wanted[i]) << i;
      }
      continue;
    }
    ASSERT_NEAR(got[i], wanted[i], unit * std::abs(wanted[i]) + 1e-30) << i;
    num_different += got[i] != wanted[i] ? 1 : 0;
  }
  EXPECT_LE(num_different, got.size() / 100);
}

double unit_of(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-23 : dtype == DType::kBFloat16 ? 0x1p-7 : 0x1p-10;
}

class CudaMerge : public CudaTest {};

TEST_F(CudaMerge, StatesOfAnyDtypeAndBaseMergeAsOnTheCpu) {
  const std::vector<std::vector<DType>> mixes = {
      {DType::kFloat32},
      {DType::kFloat32, DType::kFloat32},
      {DType::kBFloat16, DType::kFloat32, DType::kFloat16},
      std::vector<DType>(256, DType::kBFloat16)};
  for (const LseBase base : {LseBase::kNatural, LseBase::kTwo}) {
    for (const auto& mix : mixes) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        for (const int64_t width : {1, 7, 512}) {
          SCOPED_TRACE(testing::Message()
                       << mix.size() << " states, width " << width << ", " << name_of(dtype));
          const Partials partials(11, width, mix);
          const std::array shape{Partials::kTokens, Partials::kHeads, width};
          const std::array rows{Partials::kTokens, Partials::kHeads};
          const auto count = static_cast<size_t>(shape[0] * shape[1] * width * size_of(dtype));
          DeviceArray<std::byte> out(kCuda, Bytes(count));
          DeviceArray<float> lse(kCuda, std::vector<float>(15, kNan));
          Bytes cpu_out(count);
          std::vector<float> cpu_lse(15, kNan);
          merge_states(partials.states(false, base),
                       contiguous_view(static_cast<void*>(cpu_out.data()), shape, dtype),
                       contiguous_view(cpu_lse.data(), rows), base);
          merge_states(partials.states(true, base),
                       contiguous_view(static_cast<void*>(out.data()), shape, dtype, kCuda),
                       lse.view(rows), base);
          expect_close(as_floats(out.read(), dtype), as_floats(cpu_out, dtype), unit_of(dtype));
          expect_close(lse.read(), cpu_lse, 0x1p-22);
          EXPECT_EQ(lse.host[0], -kInf) << "empty in every state";
          EXPECT_EQ(as_floats(out.host, dtype)[0], 0);
        }
      }
    }
  }
}

TEST_F(CudaMerge, NanAndInfinitySpoilTheirOwnRowsOnly) {
  Partials partials(12, 8, {DType::kFloat32, DType::kFloat32});
  partials.lses[0].host[4] = kNan;
  partials.lses[1].host[7] = kInf;
  partials.lses[0].upload();
  partials.lses[1].upload();
  const std::array<int64_t, 3> shape{5, 3, 8};
  const std::array<int64_t, 2> rows{5, 3};
  DeviceArray<float> out(kCuda, std::vector<float>(120)), lse(kCuda, std::vector<float>(15));
  std::vector<float> cpu_out(120), cpu_lse(15);
  merge_states(partials.states(false, LseBase::kNatural), contiguous_view(cpu_out.data(), shape),
               contiguous_view(cpu_lse.data(), rows));
  merge_states(partials.states(true, LseBase::kNatural), out.view(shape), lse.view(rows));
  expect_close(out.read(), cpu_out, 0x1p-23);
  expect_close(lse.read(), cpu_lse, 0x1p-22);
  EXPECT_TRUE(std::isnan(out.host[4 * 8]) && std::isnan(out.host[7 * 8]));
  EXPECT_FALSE(std::isnan(out.host[5 * 8]));
}

// The output may be one of the states, whichever, and the LSE too or not at all.
TEST_F(CudaMerge, OutputMayBeOneOfTheStates) {
  for (const size_t target : {0, 1, 2}) {
    Partials partials(13, 65, {DType::kFloat32, DType::kFloat32, DType::kFloat32});
    const std::array<int64_t, 3> shape{5, 3, 65};
    const std::array<int64_t, 2> rows{5, 3};
    std::vector<float> cpu_out(5 * 3 * 65), cpu_lse(15);
    merge_states(partials.states(false, LseBase::kNatural), contiguous_view(cpu_out.data(), shape),
                 contiguous_view(cpu_lse.data(), rows));
    DeviceArray<std::byte>& out = partials.outs[target];
    merge_states(partials.states(true, LseBase::kNatural),
                 contiguous_view(static_cast<void*>(out.data()), shape, DType::kFloat32, kCuda),
                 target == 2 ? TensorView<float, 2>{} : partials.lses[target].view(rows));
    expect_close(as_floats(out.read(), DType::kFloat32), cpu_out, 0x1p-23);
    if (target != 2) {
      expect_close(partials.lses[target].read(), cpu_lse, 0x1p-22);
    }
  }
}

TEST_F(CudaMerge, MoreStatesThanALaunchTakesAreRefusedAndTheNextMergeIsWell) {
  const Partials many(14, 4, std::vector<DType>(257, DType::kFloat32));
  const std::array<int64_t, 3> shape{5, 3, 4};
  DeviceArray<float> out(kCuda, std::vector<float>(60, kNan));
  auto states = many.states(true, LseBase::kNatural);
  EXPECT_THROW(merge_states(states, out.view(shape), {}), InvalidArgument);
  states.pop_back();
  merge_states(states, out.view(shape), {});
  EXPECT_THAT(out.read(), testing::Each(testing::Not(testing::IsNan())));
}

}  // namespace
}  // namespace mla::cuda
