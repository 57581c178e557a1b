#include "core/tensor_checks.hpp"

#include <utility>

namespace mla {

void refuse_tensor(const TensorName& name, const std::string& suffix, std::string expected,
                   std::string got) {
  throw_invalid({.what = name.text() + suffix,
                 .where = name.where,
                 .expected = std::move(expected),
                 .got = std::move(got)});
}

namespace {

[[noreturn]] void refuse_stride(const TensorName& name, size_t d, std::string expected,
                                int64_t got) {
  refuse_tensor(name, ".stride[" + std::to_string(d) + "]", std::move(expected),
                std::to_string(got));
}

}  // namespace

void check_row_strides(const TensorName& name, const RowStrides& rows) {
  for (size_t d = 0; d < 2; ++d) {
    int64_t end = 0;
    if (rows.stride[d] < 0 || __builtin_mul_overflow(rows.stride[d], rows.extent[d], &end) ||
        end > (int64_t{1} << 59)) {
      refuse_stride(name, d, "0 or more, within 2^59 elements", rows.stride[d]);
    }
  }
}

void check_rows_apart(const TensorName& name, const RowStrides& rows) {
  if (rows.extent[0] == 0 || rows.extent[1] == 0) return;
  size_t inner = 1;
  if (rows.extent[0] > 1 && (rows.extent[1] == 1 || rows.stride[0] < rows.stride[1])) inner = 0;
  const size_t outer = 1 - inner;
  const auto check = [&](size_t d, int64_t least) {
    if (rows.extent[d] <= 1 || rows.stride[d] >= least) return;
    refuse_stride(name, d, "at least " + std::to_string(least) + ", so that rows do not overlap",
                  rows.stride[d]);
  };
  check(inner, rows.width);
  check(outer, (rows.extent[inner] - 1) * rows.stride[inner] + rows.width);
}

ByteRows byte_rows(const void* data, DType dtype, const RowStrides& rows) {
  const auto size = static_cast<uint64_t>(size_of(dtype));
  ByteRows bytes{.begin = reinterpret_cast<uintptr_t>(data),
                 .width = static_cast<uint64_t>(rows.width) * size};
  for (size_t d = 0; d < 2; ++d) {
    bytes.extent[d] = static_cast<uint64_t>(rows.extent[d]);
    if (rows.extent[d] > 1) bytes.stride[d] = static_cast<uint64_t>(rows.stride[d]) * size;
  }
  return bytes;
}

namespace {

// Bytes from the first row's begin to the last one's end; modulo `step`, where that is not 0.
uint64_t span_of(const ByteRows& rows, uint64_t step) {
  uint64_t span = rows.width;
  for (size_t d = 0; d < 2; ++d) {
    const bool repeats = step > 0 && rows.stride[d] % step == 0;
    if (!repeats) span += (rows.extent[d] - 1) * rows.stride[d];
  }
  return span;
}

bool is_apart_modulo(const ByteRows& low, const ByteRows& high, uint64_t step) {
  const uint64_t distance = (high.begin - low.begin) % step;
  return span_of(low, step) <= distance && distance + span_of(high, step) <= step;
}

}  // namespace

bool may_overlap(const ByteRows& a, const ByteRows& b) {
  for (const ByteRows& rows : {a, b}) {
    if (rows.extent[0] == 0 || rows.extent[1] == 0 || rows.width == 0) return false;
  }
  const ByteRows& low = a.begin <= b.begin ? a : b;
  const ByteRows& high = a.begin <= b.begin ? b : a;
  if (low.begin + span_of(low, 0) <= high.begin) return false;
  for (const uint64_t step : {a.stride[0], a.stride[1], b.stride[0], b.stride[1]}) {
    if (step > 0 && is_apart_modulo(low, high, step)) return false;
  }
  return true;
}

void check_apart(const TensorName& name, const ByteRows& output, const TensorName& other,
                 const ByteRows& rows) {
  if (!may_overlap(output, rows)) return;
  refuse_tensor(name, "", "memory apart from that of " + other.text(), "memory that overlaps it");
}

void check_columns(const TensorName& name, int64_t width, int64_t stride) {
  if (width > 1 && stride != 1) refuse_tensor(name, ".stride[2]", "1", std::to_string(stride));
}

}  // namespace mla
