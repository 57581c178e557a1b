#include "config.hpp"

#include <limits>

#include "export.hpp"

namespace mla::py {

namespace ffi = tvm::ffi;

int32_t narrow(int64_t value, ArgName name) {
  constexpr int64_t kLow = std::numeric_limits<int32_t>::min();
  constexpr int64_t kHigh = std::numeric_limits<int32_t>::max();
  if (value < kLow || value > kHigh) {
    throw_invalid({name.what, name.where, "a number of 32 bits", std::to_string(value)});
  }
  return static_cast<int32_t>(value);
}

Device device_from(int64_t kind, int64_t index) {
  return {static_cast<DeviceKind>(kind), narrow(index, {"device index", "libmla"})};
}

Geometry geometry_from(const Fields& fields, const char* where) {
  return {.num_heads = narrow(fields[0], {"geometry.num_heads", where}),
          .kv_lora_rank = narrow(fields[1], {"geometry.kv_lora_rank", where}),
          .qk_rope_head_dim = narrow(fields[2], {"geometry.qk_rope_head_dim", where}),
          .page_size = narrow(fields[3], {"geometry.page_size", where}),
          .dtype = static_cast<DType>(fields[4]),
          .kv_dtype = static_cast<DType>(fields[5])};
}

std::optional<CacheStrides> strides_from(const ffi::Optional<Fields>& fields) {
  if (!fields.has_value()) return std::nullopt;
  const Fields& f = *fields;
  return CacheStrides{.ckv_page = f[0], .ckv_row = f[1], .kpe_page = f[2], .kpe_row = f[3]};
}

Limits limits_from(const Fields& fields) {
  return {.max_rows = fields[0], .max_tokens = fields[1], .max_listed_pages = fields[2]};
}

SplitPolicy splits_from(const Fields& fields, const char* where) {
  return {.fixed_tokens = narrow(fields[0], {"splits.fixed_tokens", where}),
          .forced_count = narrow(fields[1], {"splits.forced_count", where})};
}

std::shared_ptr<Executor> executor_from(const ffi::Optional<ExecutorBox>& box) {
  return box.has_value() ? **box : nullptr;
}

namespace {

ExecutorBox executor_make(int64_t num_threads) {
  return ExecutorBox::make(
      {}, std::make_shared<Executor>(narrow(num_threads, {"num_threads", "Executor"})));
}

int64_t executor_num_threads(const ExecutorBox& executor) { return (*executor)->num_threads(); }

}  // namespace

MLA_PY_EXPORT(executor_make)
MLA_PY_EXPORT(executor_num_threads)

}  // namespace mla::py
