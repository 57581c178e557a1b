#pragma once

#include <cstdint>
#include <span>

#include "mla/batch.hpp"
#include "mla/export.hpp"
#include "mla/geometry.hpp"

namespace mla {

/// One output row of the reference, in double.
struct ReferenceRow {
  double lse = 0;          ///< natural; -inf where no key is visible
  double max_abs_ckv = 0;  ///< largest |ckv| that the row attends to: the scale of its error bound
  double max_abs_score = 0;  ///< largest |score| after sm_scale
};

/// Plain loops in double over the (rounded) inputs: what every kernel is compared with.
/// Attention of query `token` (an index into the packed batch) and `head`.
///
/// batch    valid, as PagedAttention::plan takes it; not checked here
/// q_nope, q_pe, cache   as RunArgs
/// out      [kv_lora_rank] doubles
MLA_API ReferenceRow reference_row(const Geometry& geometry, const Batch& batch, float sm_scale,
                                   bool causal, const ConstTensor<3>& q_nope,
                                   const ConstTensor<3>& q_pe, const LatentViews& cache,
                                   int64_t token, int64_t head, std::span<double> out);

}  // namespace mla
