#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>

#include "mla/error.hpp"
#include "mla/tensor_view.hpp"

// Checks of constant cost that every call which takes tensors makes. Strings are only built on
// failure.
namespace mla {

/// What a message calls a tensor: "out", or "states[2].out" where it stands in a list.
struct TensorName {
  const char* where;  ///< the call
  const char* field;
  int64_t index = -1;  ///< in `list`; -1: in none
  const char* list = "states";

  std::string text() const {
    return index < 0 ? field : std::string(list) + "[" + std::to_string(index) + "]." + field;
  }
};

[[noreturn]] void refuse_tensor(const TensorName& name, const std::string& suffix,
                                std::string expected, std::string got);

/// Where it lives, what it holds, its shape, and that it is there at all.
template <class T, int Rank>
void check_tensor(const TensorName& name, const TensorView<T, Rank>& tensor,
                  const std::type_identity_t<std::array<int64_t, Rank>>& shape, DType dtype,
                  Device device) {
  if (tensor.shape != shape) {
    refuse_tensor(name, ".shape", to_string(shape), to_string(tensor.shape));
  }
  if (tensor.dtype != dtype) {
    refuse_tensor(name, ".dtype", std::string(name_of(dtype)), std::string(name_of(tensor.dtype)));
  }
  if (tensor.device != device) {
    refuse_tensor(name, ".device", to_string(device), to_string(tensor.device));
  }
  if (tensor.empty()) return;
  if (tensor.data == nullptr) refuse_tensor(name, ".data", "a tensor " + to_string(shape), "null");
  if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(size_of(dtype)) != 0) {
    refuse_tensor(
        name, ".data",
        "an address aligned to its elements, " + std::to_string(size_of(dtype)) + " bytes",
        "another");
  }
}

/// The strides of tokens and heads in [T, H] or [T, H, width], as two numbers.
struct RowStrides {
  std::array<int64_t, 2> extent;
  std::array<int64_t, 2> stride;
  int64_t width = 1;
};

template <class T, int Rank>
RowStrides row_strides(const TensorView<T, Rank>& tensor) {
  static_assert(Rank == 2 || Rank == 3);
  RowStrides rows{{tensor.shape[0], tensor.shape[1]}, {tensor.stride[0], tensor.stride[1]}};
  if constexpr (Rank == 3) rows.width = tensor.shape[2];
  return rows;
}

/// Strides are 0 or more and no address is beyond 2^61 bytes.
void check_row_strides(const TensorName& name, const RowStrides& rows);

/// Rows of an output do not run into each other, whichever of tokens and heads is outermost.
void check_rows_apart(const TensorName& name, const RowStrides& rows);

/// Where the rows of a tensor lie, in bytes: extent[0] * extent[1] of them.
struct ByteRows {
  uint64_t begin = 0;
  std::array<uint64_t, 2> extent{}, stride{};
  uint64_t width = 0;

  bool operator==(const ByteRows&) const = default;
};

/// Of a tensor that was checked; strides of a dimension of 1 row count as 0.
ByteRows byte_rows(const void* data, DType dtype, const RowStrides& rows);
template <class T, int Rank>
ByteRows byte_rows(const TensorView<T, Rank>& tensor) {
  return byte_rows(tensor.data, tensor.dtype, row_strides(tensor));
}

/// Whether a byte may be in both, at constant cost. Rows that interleave are told apart where they
/// repeat at one distance, as parts of the rows of one buffer do; others count as overlapping.
bool may_overlap(const ByteRows& a, const ByteRows& b);

/// An output has no byte of another tensor.
void check_apart(const TensorName& name, const ByteRows& output, const TensorName& other,
                 const ByteRows& rows);

/// The last dimension has no gaps.
void check_columns(const TensorName& name, int64_t width, int64_t stride);

}  // namespace mla
