#pragma once

#include <cstdint>

#include "core/host_device.hpp"
#include "mla/device.hpp"
#include "mla/dtype.hpp"

namespace mla::cases {

/// The only source of random data in tests, tools and benchmarks: counter based, so that any value
/// can be computed again from its name alone, in any order and on any thread. A row of a tensor is
/// named by three numbers; for a cached latent row of a served request these are the run's seed, a
/// key of the content (equal prefixes have equal keys and so equal bytes) and the position.
///
/// The same numbers give the same bits on every machine. Not for cryptography.

/// The name of one row: 64 well mixed bits of three numbers.
constexpr uint64_t row_key(uint64_t seed, uint64_t content, uint64_t position) {
  uint64_t state = 0;
  for (const uint64_t word : {seed, content, position}) {
    state += word + 0x9e3779b97f4a7c15U;  // 2^64 over the golden ratio: 0 0 0 is no fixed point
    state = (state ^ (state >> 32)) * 0xd6e8feb86659fd93U;
    state = (state ^ (state >> 29)) * 0xa0761d6478bd642fU;
    state ^= state >> 32;
  }
  return state;
}

/// 32 random bits of one column of a row.
MLA_HOST_DEVICE constexpr uint32_t random_bits(uint64_t key, uint32_t column) {
  uint32_t word = static_cast<uint32_t>(key) + column * 0x9e3779b9U;
  word = (word ^ (word >> 16)) * 0x85ebca6bU;
  word ^= static_cast<uint32_t>(key >> 32);
  word = (word ^ (word >> 13)) * 0xc2b2ae35U;
  return word ^ (word >> 16);
}

/// One value of a row, uniform over the multiples of 2^-23 in [-1, 1).
MLA_HOST_DEVICE constexpr float uniform_value(uint64_t key, uint32_t column) {
  return static_cast<float>(static_cast<int32_t>(random_bits(key, column)) >> 8) * 0x1p-23F;
}

/// Fills `out` [columns] of fp32, bf16 or fp16 with uniform_value(key, first_column + i), rounded
/// to nearest even (so that 16-bit values lie in [-1, 1]). Does not allocate.
void fill_uniform(uint64_t key, DType dtype, void* out, int64_t columns, uint32_t first_column = 0);

/// The same bits on a CUDA device: queues fill_uniform(keys[r], ...) into each row r of `out`.
/// keys  [num_rows] on the device; out  [num_rows, columns] on the device, without gaps
/// num_rows is below 2^31. Throws CudaError.
void fill_uniform_rows(const uint64_t* keys, int64_t num_rows, DType dtype, void* out,
                       int64_t columns, Device device, Stream stream);

}  // namespace mla::cases
