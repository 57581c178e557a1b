#pragma once

#include "mla/step.hpp"

namespace mla::engine {

/// Throws InvalidArgument unless the lease's slot is 0 or more and its bucket, if it has one, has
/// at least one row and one token and at most those of `largest`.
void check_lease(const SlotLease& lease, const GraphShape& largest, const char* where);

/// Throws InvalidArgument unless 0 <= largest <= limits in each part.
void check_graph_shape(const GraphShape& largest, const GraphShape& limits, const char* where);

}  // namespace mla::engine
