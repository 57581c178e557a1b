#include "engine/lease.hpp"

#include <cstdint>
#include <string>

#include "mla/error.hpp"

namespace mla::engine {

void check_lease(const SlotLease& lease, const GraphShape& largest, const char* where) {
  if (lease.slot < 0) {
    throw_invalid({"lease.slot", where, "0 or more", std::to_string(lease.slot)});
  }
  if (!lease.bucket) return;
  const auto within = [&](const char* what, int64_t value, int64_t most) {
    if (value >= 1 && value <= most) return;
    throw_invalid({what, where, "1 to " + std::to_string(most) + ", of the largest graph",
                   std::to_string(value)});
  };
  within("lease.bucket.shape.num_rows", lease.bucket->shape.num_rows, largest.num_rows);
  within("lease.bucket.shape.num_tokens", lease.bucket->shape.num_tokens, largest.num_tokens);
}

void check_graph_shape(const GraphShape& largest, const GraphShape& limits, const char* where) {
  const auto within = [&](const char* what, int64_t value, int64_t most) {
    if (value >= 0 && value <= most) return;
    throw_invalid(
        {what, where, "0 to " + std::to_string(most) + ", the limit", std::to_string(value)});
  };
  within("largest.num_rows", largest.num_rows, limits.num_rows);
  within("largest.num_tokens", largest.num_tokens, limits.num_tokens);
  within("largest.num_listed_pages", largest.num_listed_pages, limits.num_listed_pages);
}

}  // namespace mla::engine
