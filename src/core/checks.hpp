#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mla/attention.hpp"

// Everything that is checked at the public boundary of attention. Inside, arguments are trusted.
namespace mla {

/// Null where the geometry is within the library's limits, else what is wrong with it.
struct GeometryFault {
  std::string what, expected, got;
};
bool find_fault(const Geometry& geometry, GeometryFault& fault);

/// The strides that an object of this config works with.
CacheStrides strides_of(const AttentionConfig& config);
/// Limits with the bucket in force.
Limits limits_of(const AttentionConfig& config);

/// Throws InvalidArgument unless everything but the kernel and the scratch is in order.
void check_config(const AttentionConfig& config);

/// The requests of a batch after its checks: key counts whichever way they were given.
struct CheckedBatch {
  int64_t num_rows = 0;
  int64_t num_tokens = 0;
  int64_t num_listed_pages = 0;
};

/// Checks the batch against the config; fills kv_len [num_rows]. Throws InvalidArgument.
CheckedBatch check_batch(const Batch& batch, const AttentionConfig& config,
                         std::vector<int32_t>& kv_len);

void check_options(const PlanOptions& options);

/// Throws InvalidArgument unless memory that the caller lends is there, large enough, and aligned
/// to 64 bytes.
void check_lent_memory(std::span<const std::byte> lent, size_t needed, const char* what,
                       const char* where);

/// Throws InvalidArgument where it is none of the enumeration's values.
void check_lse_base(LseBase base, const char* what, const char* where);

/// The query tokens that tensors which follow a plan may have: the plan's or the bucket's. In a
/// capture the bucket's alone: later plans of up to as many are replayed into the same tensors.
struct TokenCounts {
  int64_t planned = 0;
  std::optional<int64_t> bucket{};  ///< there in a capture
  bool in_capture = false;

  bool accept(int64_t num_tokens) const {
    return (num_tokens == planned && !in_capture) || num_tokens == bucket;
  }
  /// For messages.
  std::string expected() const;
};

/// Checks of constant cost.
void check_run(const RunArgs& args, const AttentionConfig& config, const TokenCounts& tokens);

}  // namespace mla
