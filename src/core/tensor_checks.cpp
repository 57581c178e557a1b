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

void check_columns(const TensorName& name, int64_t width, int64_t stride) {
  if (width > 1 && stride != 1) refuse_tensor(name, ".stride[2]", "1", std::to_string(stride));
}

}  // namespace mla
