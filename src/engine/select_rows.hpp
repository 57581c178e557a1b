#pragma once

#include <cstdint>

#include "core/checks.hpp"
#include "mla/device.hpp"
#include "mla/tensor_view.hpp"

namespace mla::engine {

/// AttentionResource::select_last_hidden: checks the tensors and copies on the device that
/// qo_indptr lives on. tokens: what `hidden` may have.
void select_last_rows(const TensorView<const int32_t, 1>& qo_indptr, const TokenCounts& tokens,
                      const ConstTensor<2>& hidden, const Tensor<2>& out, Stream stream);

}  // namespace mla::engine
