#pragma once

#include "core/attention_impl.hpp"
#include "mla/reference.hpp"

namespace mla::cpu {

/// Attention of one row over keys [kv_begin, kv_end) that it may see, in double.
/// out  [kv_lora_rank] doubles
ReferenceRow reference_row(const AttentionParams& params, int32_t request, int64_t row,
                           int64_t kv_begin, int64_t kv_end, double* out);

/// The "reference" kernel of the CPU table: every shape, plain loops, slow.
extern const AttentionImpl kReferenceImpl;

}  // namespace mla::cpu
