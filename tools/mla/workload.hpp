#pragma once

#include <cstdint>
#include <vector>

#include "mla/page_key.hpp"
#include "mla/trace.hpp"

namespace mla::cli {

/// A request of the trace as it is served: lengths scaled, content named.
///
/// What a token is depends on everything before it, so content is named by the whole prefix: the
/// key of a block mixes the ids of all blocks up to it. Equal prefixes have equal keys, and nothing
/// else has.
struct Request {
  int64_t prompt_tokens = 0;         ///< >= 1
  int64_t output_tokens = 0;         ///< >= 1
  double arrival_ms = 0;             ///< after the first request's
  int64_t block_tokens = 0;          ///< prompt tokens of one key
  std::vector<uint64_t> block_keys;  ///< of the prompt's prefixes, block by block
  uint64_t output_key = 0;           ///< of what the request generates: of its own

  /// Key of the content at `position`: of the prompt's prefix, or of the request's own output.
  uint64_t content_key(int64_t position) const;
  /// Keys of the prompt's full pages. What a request generates is its own and is not shared.
  std::vector<PageKey> page_keys(int64_t page_size) const;
  /// Tokens that the cache holds at the end: what is generated last is never fed back.
  int64_t stored_tokens() const { return prompt_tokens + output_tokens - 1; }
  /// The most that it holds at a time where each decode step verifies `num_drafts` more: those of
  /// the last step are past its end.
  int64_t peak_tokens(int64_t num_drafts) const {
    return stored_tokens() + (output_tokens > 1 ? num_drafts : 0);
  }
};

/// Pages that `tokens` take.
inline int64_t pages_of(int64_t tokens, int64_t page_size) {
  return (tokens + page_size - 1) / page_size;
}

/// Scales the lengths of a trace and its blocks alike, so that the shares of the requests in each
/// other's prompts stay: a block has max(1, floor(512 * scale)) tokens, a whole block of the input
/// keeps a whole block, the rest of the input and the output are rounded down, and nothing falls
/// below one token. `length_scale` > 0. Throws UsageError where a scaled length is beyond
/// kMaxTraceLength.
std::vector<Request> make_workload(const std::vector<TraceRequest>& trace, double length_scale);

}  // namespace mla::cli
