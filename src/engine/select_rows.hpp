#pragma once

#include <cstdint>

#include "mla/device.hpp"
#include "mla/tensor_view.hpp"

namespace mla::engine {

/// AttentionResource::select_last_hidden: checks the tensors and copies on the device that
/// qo_indptr lives on. num_tokens: the plan's; or bucket_tokens, if that is not negative.
void select_last_rows(const TensorView<const int32_t, 1>& qo_indptr, int64_t num_tokens,
                      int64_t bucket_tokens, const ConstTensor<2>& hidden, const Tensor<2>& out,
                      Stream stream);

}  // namespace mla::engine
