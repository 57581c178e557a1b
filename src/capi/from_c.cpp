#include "capi/from_c.hpp"

#include <utility>

#include "capi/handle.hpp"

namespace mla::capi {
namespace {

// No struct of any version comes near; a struct_size above it was never set.
constexpr size_t kMaxStructSize = 4096;

[[noreturn]] void refuse(const std::string& what, const char* where, const char* expected,
                         int64_t got) {
  throw_invalid({.what = what, .where = where, .expected = expected, .got = std::to_string(got)});
}

// The enumerations of the two interfaces have the same values.
static_assert(static_cast<int>(DType::kFloat32) == MLA_FLOAT32 &&
              static_cast<int>(DType::kBFloat16) == MLA_BFLOAT16 &&
              static_cast<int>(DType::kFloat16) == MLA_FLOAT16 &&
              static_cast<int>(DType::kInt32) == MLA_INT32 &&
              static_cast<int>(DType::kInt64) == MLA_INT64);
static_assert(static_cast<int>(DeviceKind::kCpu) == MLA_CPU &&
              static_cast<int>(DeviceKind::kCuda) == MLA_CUDA);
static_assert(static_cast<int>(LseBase::kNatural) == MLA_LSE_NATURAL &&
              static_cast<int>(LseBase::kTwo) == MLA_LSE_BASE_2);

}  // namespace

void refuse_null(const char* name, const char* where) {
  throw_invalid({.what = name, .where = where, .expected = "a pointer", .got = "null"});
}

size_t checked_struct_size(size_t struct_size, size_t known, const char* name, const char* where) {
  if (struct_size >= sizeof(size_t) && struct_size <= kMaxStructSize) return struct_size;
  throw_invalid({.what = std::string(name) + "->struct_size",
                 .where = where,
                 .expected = "sizeof of the struct, " + std::to_string(known) + " in this version",
                 .got = std::to_string(struct_size)});
}

void check_unknown_fields(std::span<const std::byte> bytes, const char* name, const char* where) {
  for (const std::byte byte : bytes) {
    if (byte == std::byte{0}) continue;
    throw_invalid({.what = name,
                   .where = where,
                   .expected = "zero in the fields that this version does not know",
                   .got = "another value: the header is newer than the library"});
  }
}

Device device_from_c(mla_device device, const char* name, const char* where) {
  if (device.kind != MLA_CPU && device.kind != MLA_CUDA) {
    refuse(std::string(name) + ".device.kind", where, "an mla_device_kind", device.kind);
  }
  return {.kind = static_cast<DeviceKind>(device.kind), .index = device.index};
}

mla_device device_to_c(Device device) {
  return {.kind = static_cast<int32_t>(device.kind), .index = device.index};
}

DType dtype_from_c(int32_t dtype, const char* owner, const char* field, const char* where) {
  if (dtype < MLA_FLOAT32 || dtype > MLA_INT64) {
    refuse(std::string(owner) + field, where, "an mla_dtype", dtype);
  }
  return static_cast<DType>(dtype);
}

LseBase lse_base_from_c(int32_t base, const char* where) {
  if (base != MLA_LSE_NATURAL && base != MLA_LSE_BASE_2) {
    refuse("lse_base", where, "an mla_lse_base", base);
  }
  return static_cast<LseBase>(base);
}

bool flag_from_c(int32_t flag, const char* name, const char* where) {
  if (flag != 0 && flag != 1) refuse(name, where, "0 or 1", flag);
  return flag == 1;
}

Geometry geometry_from_c(const mla_geometry* geometry, const char* where) {
  const mla_geometry given = read_struct(geometry, "geometry", where);
  return {.num_heads = given.num_heads,
          .kv_lora_rank = given.kv_lora_rank,
          .qk_rope_head_dim = given.qk_rope_head_dim,
          .page_size = given.page_size,
          .dtype = dtype_from_c(given.dtype, "geometry", ".dtype", where),
          .kv_dtype = dtype_from_c(given.kv_dtype, "geometry", ".kv_dtype", where)};
}

CacheStrides strides_from_c(const mla_cache_strides& strides) {
  return {.ckv_page = strides.ckv_page,
          .ckv_row = strides.ckv_row,
          .kpe_page = strides.kpe_page,
          .kpe_row = strides.kpe_row};
}

Limits limits_from_c(int64_t max_rows, int64_t max_tokens, int64_t max_listed_pages) {
  Limits limits;
  if (max_rows != 0) limits.max_rows = max_rows;
  if (max_tokens != 0) limits.max_tokens = max_tokens;
  if (max_listed_pages != 0) limits.max_listed_pages = max_listed_pages;
  return limits;
}

std::optional<Bucket> bucket_from_c(int64_t rows, int64_t tokens, const char* owner,
                                    const char* where) {
  if (rows == 0 && tokens == 0) return std::nullopt;
  for (const auto& [field, value] : {std::pair{".bucket_rows", rows}, {".bucket_tokens", tokens}}) {
    if (value < 1) {
      refuse(std::string(owner) + field, where, "at least 1 under a bucket, or both 0", value);
    }
  }
  return Bucket{.num_rows = rows, .num_tokens = tokens};
}

std::span<std::byte> lent_from_c(void* memory, size_t bytes, const char* name, const char* where) {
  if ((memory == nullptr) != (bytes == 0)) {
    throw_invalid({.what = name,
                   .where = where,
                   .expected = "an address and its size in bytes, or neither",
                   .got = (memory == nullptr ? "null and " : "an address and ") +
                          std::to_string(bytes) + " bytes"});
  }
  return {static_cast<std::byte*>(memory), bytes};
}

void check_count(int64_t count, int64_t most, const char* name, const char* where) {
  if (count >= 0 && count <= most) return;
  refuse(name, where, ("0 to " + std::to_string(most)).c_str(), count);
}

void check_array(const void* entries, int64_t count, const char* name, const char* where) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (count < 0 || count > kMost) {
    check_count(count, kMost, (std::string("the count of ") + name).c_str(), where);
  }
  if (count > 0 && entries == nullptr) refuse_null(name, where);
}

void refuse_handle(const char* type, const char* name, const char* where) {
  throw_invalid({.what = name,
                 .where = where,
                 .expected = std::string("a living ") + type,
                 .got = "a pointer to something else"});
}

void check_rank(int32_t rank, int expected, const char* name, const char* where) {
  if (rank == expected) return;
  refuse(std::string(name) + ".rank", where, std::to_string(expected).c_str(), rank);
}

void check_dtype(DType dtype, DType expected, const char* name, const char* where) {
  if (dtype == expected) return;
  throw_invalid({.what = std::string(name) + ".dtype",
                 .where = where,
                 .expected = std::string(name_of(expected)),
                 .got = std::string(name_of(dtype))});
}

}  // namespace mla::capi
