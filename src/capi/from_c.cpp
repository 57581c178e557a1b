#include "capi/from_c.hpp"

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

void check_rank(int32_t rank, int expected, const char* name, const char* where) {
  if (rank == expected) return;
  refuse(std::string(name) + ".rank", where, std::to_string(expected).c_str(), rank);
}

TensorView<float, 2> lse_from_c(const mla_tensor& tensor, const char* name, const char* where) {
  const Tensor<2> view = tensor_from_c<2>(tensor, name, where);
  if (view.dtype != DType::kFloat32) {
    refuse(std::string(name) + ".dtype", where, "MLA_FLOAT32 = 0", tensor.dtype);
  }
  return {.data = static_cast<float*>(view.data),
          .shape = view.shape,
          .stride = view.stride,
          .device = view.device};
}

}  // namespace mla::capi
