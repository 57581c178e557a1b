#include "engine/select_rows.hpp"

#include <string>
#include <utility>

#include "core/tensor_checks.hpp"
#include "device/operations.hpp"
#include "device/runtime.hpp"
#include "mla/error.hpp"

namespace mla::engine {
namespace {

constexpr const char* kWhere = "AttentionResource::select_last_hidden";

[[noreturn]] void refuse(std::string what, std::string expected, std::string got) {
  throw_invalid({.what = std::move(what),
                 .where = kWhere,
                 .expected = std::move(expected),
                 .got = std::move(got)});
}

template <class T>
RowStrides rows_of(const TensorView<T, 2>& matrix) {
  return {{matrix.shape[0], 1}, {matrix.stride[0], 0}, matrix.shape[1]};
}

template <class T>
void check_rows(const char* field, const TensorView<T, 2>& tensor, Device device) {
  const std::string name = field;
  if (tensor.device != device)
    refuse(name + ".device", to_string(device), to_string(tensor.device));
  if (tensor.shape[0] < 0 || tensor.shape[1] < 0) {
    refuse(name + ".shape", "0 or more of each", to_string(tensor.shape));
  }
  if (tensor.empty()) return;
  if (tensor.data == nullptr) refuse(name + ".data", "a tensor", "null");
  if (tensor.stride[1] != 1) {
    refuse(name + ".stride[1]", "1: rows are contiguous", std::to_string(tensor.stride[1]));
  }
  check_row_strides({kWhere, field}, rows_of(tensor));
}

}  // namespace

void select_last_rows(const TensorView<const int32_t, 1>& qo_indptr, const TokenCounts& tokens,
                      const ConstTensor<2>& hidden, const Tensor<2>& out, Stream stream) {
  check_rows("hidden", hidden, qo_indptr.device);
  check_rows("out", out, qo_indptr.device);
  if (!tokens.accept(hidden.shape[0])) {
    refuse("hidden.shape[0]", tokens.expected(), std::to_string(hidden.shape[0]));
  }
  if (hidden.dtype > DType::kInt64) {
    refuse("hidden.dtype", "a dtype", std::to_string(static_cast<int>(hidden.dtype)));
  }
  if (out.dtype != hidden.dtype) {
    refuse("out.dtype", std::string(name_of(hidden.dtype)) + " = hidden.dtype",
           std::string(name_of(out.dtype)));
  }
  const std::array<int64_t, 2> shape = {qo_indptr.shape[0] - 1, hidden.shape[1]};
  if (out.shape != shape) {
    refuse("out.shape", to_string(shape) + " = [rows, hidden.shape[1]]", to_string(out.shape));
  }
  if (out.empty()) return;
  check_rows_apart({kWhere, "out"}, rows_of(out));
  check_apart({kWhere, "out"}, byte_rows(out.data, out.dtype, rows_of(out)), {kWhere, "hidden"},
              byte_rows(hidden.data, hidden.dtype, rows_of(hidden)));
  device::runtime_of(qo_indptr.device)
      .operations()
      .select_last_rows(qo_indptr.data, hidden, out, stream);
}

}  // namespace mla::engine
