#pragma once

#include <cstdint>
#include <span>

#include "mla/executor.hpp"
#include "mla/export.hpp"
#include "mla/tensor_view.hpp"

namespace mla {

/// The logarithm that an LSE is in: ln, as everywhere in this library unless asked, or log2.
enum class LseBase : uint8_t { kNatural = 0, kTwo = 1 };

/// Attention over one part of the keys: normalised output and log-sum-exp of the scores.
struct PartialState {
  ConstTensor<3> out{};              ///< [T, H, D] fp32, bf16 or fp16; each state may differ
  TensorView<const float, 2> lse{};  ///< [T, H] fp32
  LseBase lse_base = LseBase::kNatural;
};

/// Merges partial results over disjoint parts of the keys into what one pass over all would give:
/// with w_i = exp(lse_i), out = sum(w_i * out_i) / sum(w_i), lse = log(sum(w_i)). A state with
/// lse -inf is the identity, whatever its out holds; merging only such gives (0, -inf). An lse of
/// NaN or +inf belongs to no state: the rows that hold one come out as NaN, and no others. Computed
/// in double, in the order of the states: the same states give the same bits, whoever computes.
///
/// states    1 or more, all of out's shape; each lse_base must be `base`
/// out       [T, H, D] fp32, bf16 or fp16, whatever the states are in; may be the very tensor of
///           one of the states
/// lse       [T, H] fp32; null data where it is not wanted; may be the very tensor of a state
/// executor  shares out the rows on the CPU; null: the calling thread does all
/// All tensors on out's device. Blocks until done on the CPU, queues one launch on `stream` on an
/// accelerator (at most 256 states there), which can be captured; allocates nothing. Throws
/// InvalidArgument (no states, a shape or base that differs, another dtype, device or stride, null
/// data, tensors that overlap; a device that is not there), CudaError (launch).
MLA_API void merge_states(std::span<const PartialState> states, const Tensor<3>& out,
                          const TensorView<float, 2>& lse, LseBase base = LseBase::kNatural,
                          Executor* executor = nullptr, Stream stream = {});

}  // namespace mla
