#pragma once

#include <span>

#include "mla/merge.hpp"

namespace mla::cpu {

/// As mla::merge_states, on tensors in host memory; arguments are checked. Blocks until done.
void merge_states(std::span<const PartialState> states, const Tensor<3>& out,
                  const TensorView<float, 2>& lse, LseBase base, Executor* executor);

}  // namespace mla::cpu
