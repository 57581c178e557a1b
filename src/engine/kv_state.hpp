#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache/page_cache.hpp"
#include "engine/kv_step.hpp"
#include "engine/stream_table.hpp"
#include "mla/kv_resource.hpp"

namespace mla::engine {

/// "x", for messages.
std::string quoted(std::string_view text);
std::string name_of_stream(RequestId request, std::string_view label);

/// What a KvResource knows, and the parts of its calls. KvResource checks order and arguments; here
/// pages move.
struct KvState {
  enum class Phase : uint8_t { kIdle, kAdmitted, kPlanned };

  KvState(LatentPool& lent_pool, const KvOptions& options);

  // Refusals.
  const StreamState& get(const KvStream& name, const char* where) const;
  StreamState& get(const KvStream& name, const char* where) {
    return const_cast<StreamState&>(std::as_const(*this).get(name, where));
  }
  StreamState& get_outside_step(const KvStream& name, const char* where);
  void require_outside_step(const StreamState& stream, const char* where) const;
  void require_absent(const KvStream& name, const char* what, const char* where) const;
  void require_phase(Phase wanted, const char* where) const;

  // Admission: names to streams (throws), what each needs, and its reservation.
  void resolve(std::span<const Segment> segments, std::vector<StepEntry>& entries);
  AdmitResult measure(std::span<StepEntry> entries);
  void reserve(std::span<StepEntry> entries);

  /// Gives each stream its own copy of the shared page that it appends to.
  void copy_tails(Stream device_stream);
  /// Enters the stream's full pages that have a key into the prefix index.
  void index_full_pages(StreamState& stream);
  /// Attaches the known prefix of the stream's first num_tokens tokens, at most num_tokens - 1.
  void attach_prefix(StreamState& stream, int64_t num_tokens);
  void add_page_keys(StreamState& stream, std::span<const PageKey> keys);
  /// Drops the pages past those of the stream's length.
  void drop_past_length(StreamState& stream);
  void end_step();

  PageCounts check() const;
  void check_stream(const StreamState& stream) const;
  void after_change() const {
    if (checks_itself) check();
  }

  LatentPool& pool;
  int32_t page_size;
  bool checks_itself;
  Phase phase = Phase::kIdle;
  cache::PageCache pages;
  StreamTable streams;
  StepLayout layout;
  std::vector<StepEntry> step;
  // Scratch that keeps its memory from call to call.
  std::vector<StepEntry> resolved;
  std::vector<int32_t> leaving;  // [num_pages], zero between calls: streams that leave a page
  std::vector<PageCopy> copies;
  uint64_t num_resolved = 0;
};

}  // namespace mla::engine
