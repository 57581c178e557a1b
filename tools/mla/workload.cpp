#include "mla/workload.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "cases/random.hpp"
#include "mla/usage_error.hpp"

namespace mla::cli {
namespace {

// What a key is of, so that keys of the two kinds never meet.
enum KeyKind : uint64_t { kPromptKey = 1, kOutputKey = 2 };

int64_t scaled(int64_t tokens, double scale) {
  const double length = std::floor(static_cast<double>(tokens) * scale);
  if (length > static_cast<double>(kMaxTraceLength)) {
    throw UsageError(fmt::format("--length-scale {}: a length of {} tokens becomes more than {}",
                                 scale, tokens, kMaxTraceLength));
  }
  return static_cast<int64_t>(length);
}

// Whole blocks of the input become whole blocks, so that block ids keep their meaning where
// 512 * scale is no whole number.
int64_t scaled_prompt(int64_t tokens, double scale, int64_t block_tokens) {
  const int64_t whole = tokens / kTraceBlockTokens * block_tokens;
  const int64_t rest = std::min(block_tokens, scaled(tokens % kTraceBlockTokens, scale));
  return std::max<int64_t>(1, whole + rest);
}

}  // namespace

uint64_t Request::content_key(int64_t position) const {
  if (position >= prompt_tokens) return output_key;
  return block_keys[static_cast<size_t>(position / block_tokens)];
}

std::vector<PageKey> Request::page_keys(int64_t page_size) const {
  std::vector<PageKey> keys(static_cast<size_t>(prompt_tokens / page_size));
  PageKey previous;
  for (size_t page = 0; page < keys.size(); ++page) {
    // The content of the last token names everything before it.
    const uint64_t content = content_key((static_cast<int64_t>(page) + 1) * page_size - 1);
    previous = keys[page] = chain_key(previous, {&content, 1});
  }
  return keys;
}

std::vector<Request> make_workload(const std::vector<TraceRequest>& trace, double length_scale) {
  const int64_t block_tokens = std::max<int64_t>(1, scaled(kTraceBlockTokens, length_scale));
  std::vector<Request> requests;
  requests.reserve(trace.size());
  for (const TraceRequest& from : trace) {
    Request to;
    scaled(from.input_length, length_scale);  // refuses what would not fit
    to.prompt_tokens = scaled_prompt(from.input_length, length_scale, block_tokens);
    to.output_tokens = std::max<int64_t>(1, scaled(from.output_length, length_scale));
    to.arrival_ms = from.timestamp_ms - trace.front().timestamp_ms;
    to.block_tokens = block_tokens;
    uint64_t key = 0;
    for (const uint64_t id : from.hash_ids) {
      key = cases::row_key(kPromptKey, key, id);
      to.block_keys.push_back(key);
    }
    to.output_key = cases::row_key(kOutputKey, requests.size(), key);
    requests.push_back(std::move(to));
  }
  return requests;
}

}  // namespace mla::cli
