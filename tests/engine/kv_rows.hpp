#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "device/test_device.hpp"
#include "mla/kv_resource.hpp"

namespace mla::engine {

// A token's latent row in a small fp32 pool (2 + 1 columns): its number, the layer, and the
// number again as kpe, so that any row read back names its token.
using Token = uint32_t;

inline PoolConfig small_pool(int64_t num_pages, int32_t page_size, int32_t num_layers = 2) {
  return {.num_layers = num_layers,
          .num_pages = num_pages,
          .page_size = page_size,
          .kv_lora_rank = 2,
          .qk_rope_head_dim = 1,
          .dtype = DType::kFloat32,
          .device = test::test_device()};
}

// Writes the planned rows of a label to every layer.
inline void write_tokens(KvResource& kv, std::string_view label, std::span<const Token> tokens) {
  const auto num_rows = static_cast<int64_t>(tokens.size());
  std::vector<float> rows(tokens.size() * 3);
  test::DeviceArray<float> on_device(kv.pool().config().device);
  for (int32_t layer = 0; layer < kv.pool().config().num_layers; ++layer) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      rows[i * 3] = rows[i * 3 + 2] = static_cast<float>(tokens[i]);
      rows[i * 3 + 1] = static_cast<float>(layer);
    }
    on_device.assign(rows);
    const auto view = on_device.view(std::array<int64_t, 2>{num_rows, 3});
    kv.write(layer, label, columns(view, 0, 2), columns(view, 2, 1));
  }
}

constexpr Token kTornRow = 0xffffffff;

// Adds the first `length` slots of `pages`.
inline void append_slots(std::vector<int64_t>& slots, std::span<const int32_t> pages,
                         int64_t length, int64_t page_size) {
  for (int64_t i = 0; i < length; ++i) {
    slots.push_back(pages[i / page_size] * page_size + i % page_size);
  }
}

// The tokens whose rows `layer` holds in these slots; kTornRow where a row is not one that
// write_tokens wrote for this layer. The rows come through `memory`, of the pool's device.
inline std::vector<Token> read_slots(const LatentPool& pool, std::span<const int64_t> slots,
                                     int32_t layer, test::DeviceArray<float>& memory) {
  memory.assign(std::vector<float>(slots.size() * 3, -1));
  pool.gather(layer, slots, memory.view(std::array<int64_t, 2>{std::ssize(slots), 3}));
  const std::vector<float>& rows = memory.read();
  std::vector<Token> tokens(slots.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const bool whole =
        rows[i * 3] == rows[i * 3 + 2] && rows[i * 3 + 1] == static_cast<float>(layer);
    tokens[i] = whole ? static_cast<Token>(rows[i * 3]) : kTornRow;
  }
  return tokens;
}

// Those of the first `length` slots of `pages`.
inline std::vector<Token> read_tokens(const LatentPool& pool, std::span<const int32_t> pages,
                                      int64_t length, int32_t layer) {
  std::vector<int64_t> slots;
  append_slots(slots, pages, length, pool.config().page_size);
  test::DeviceArray<float> memory(pool.config().device);
  return read_slots(pool, slots, layer, memory);
}

// Keys of the full pages of `tokens`.
inline std::vector<PageKey> keys_of(std::span<const Token> tokens, int32_t page_size) {
  std::vector<PageKey> keys;
  std::vector<uint64_t> ids(page_size);
  for (size_t begin = 0; begin + page_size <= tokens.size(); begin += page_size) {
    for (int32_t i = 0; i < page_size; ++i) ids[i] = tokens[begin + i];
    keys.push_back(chain_key(keys.empty() ? PageKey{} : keys.back(), ids));
  }
  return keys;
}

}  // namespace mla::engine
