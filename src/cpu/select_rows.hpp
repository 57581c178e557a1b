#pragma once

#include <cstdint>

#include "mla/tensor_view.hpp"

namespace mla::cpu {

/// Copies row qo_indptr[i + 1] - 1 of `hidden` to row i of `out`, zeros where qo_indptr[i] is
/// qo_indptr[i + 1]. out.shape[0] rows; arguments are checked. Blocks until done.
void select_last_rows(const int32_t* qo_indptr, const ConstTensor<2>& hidden, const Tensor<2>& out);

}  // namespace mla::cpu
