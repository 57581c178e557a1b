#include "cpu/select_rows.hpp"

#include <cstddef>
#include <cstring>

namespace mla::cpu {

void select_last_rows(const int32_t* qo_indptr, const ConstTensor<2>& hidden,
                      const Tensor<2>& out) {
  const int64_t item = size_of(out.dtype);
  const auto row_bytes = static_cast<size_t>(out.shape[1] * item);
  const auto* from = static_cast<const std::byte*>(hidden.data);
  auto* to = static_cast<std::byte*>(out.data);
  for (int64_t i = 0; i < out.shape[0]; ++i) {
    std::byte* row = to + i * out.stride[0] * item;
    const int64_t last = int64_t{qo_indptr[i + 1]} - 1;
    if (last < qo_indptr[i]) {
      std::memset(row, 0, row_bytes);
    } else {
      std::memcpy(row, from + last * hidden.stride[0] * item, row_bytes);
    }
  }
}

}  // namespace mla::cpu
