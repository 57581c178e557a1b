#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache/page_cache.hpp"
#include "engine/pool_claim.hpp"
#include "engine/slot_buffers.hpp"
#include "engine/step_layout.hpp"
#include "engine/stream_table.hpp"
#include "mla/geometry.hpp"
#include "mla/kv_resource.hpp"

namespace mla::engine {

/// For messages.
std::string name_of_stream(RequestId request, std::string_view label);

/// A laid-out step and what is published of it.
struct PlannedStep {
  StepLayout layout;
  KvPlan plan;
  SlotLease lease;
  std::vector<device::StagedBuffer*>
      device_slots;  // of each plan first; empty: the host's are read
};

/// What a KvResource knows, and the parts of its calls. KvResource checks order and arguments; here
/// pages move.
struct KvState {
  static constexpr GraphShape kLimits{
      .num_rows = kMaxRows, .num_tokens = kMaxTokens, .num_listed_pages = kMaxListedPages};
  enum class Phase : uint8_t { kIdle, kAdmitted, kPlanned };

  KvState(LatentPool& lent_pool, const KvOptions& options);

  // Refusals.
  const StreamState& get(const KvStream& name, const char* where) const;
  StreamState& get(const KvStream& name, const char* where) {
    return const_cast<StreamState&>(std::as_const(*this).get(name, where));
  }
  StreamState& get_outside_step(const KvStream& name, const char* where);
  void require_outside_step(const StreamState& stream, const char* where) const;
  void require_absent(const KvStream& name, const std::string& what, const char* where) const;
  void require_phase(Phase wanted, const char* where) const;
  void require_same(const KvStep& wanted, const StepData& admitted, const char* where) const;

  // Admission, in kv_admission.cpp.
  /// Resolves the names of `wanted`, makes the targets of its forks (pending) and takes the pages
  /// that it needs, all into `early`. An early step that is there is dropped: what it holds is to
  /// be had. When it throws or pages are short nothing is changed, and that step is as it was.
  AdmitResult take(const KvStep& wanted, const char* where);
  /// Makes what was taken the current step's.
  void adopt_early();
  /// Leaves what was taken for the step after the current one.
  void keep_early();
  /// Drops the early step, if any.
  void drop_early();
  /// Ends the current step undone.
  void give_back();
  /// Ends the current step.
  void end_step();

  /// Gives each stream its own copy of the shared page that it appends to.
  void copy_tails(Stream device_stream);
  /// Enters the stream's full pages that have a key into the prefix index. Whether one of them was
  /// replaced by the index's own.
  bool index_full_pages(StreamState& stream);
  /// Attaches the known prefix of the stream's first num_tokens tokens, at most num_tokens - 1.
  void attach_prefix(StreamState& stream, int64_t num_tokens);
  void add_page_keys(StreamState& stream, std::span<const PageKey> keys);
  /// Drops the pages past those of the stream's length.
  void drop_past_length(StreamState& stream);
  /// Makes the empty stream `to` share the content of `from`.
  void copy_content(const StreamState& from, StreamState& to);

  PageCounts check() const;
  void check_stream(const StreamState& stream) const;
  void after_change() const {
    if (checks_itself) check();
  }

  LatentPool& pool;
  PoolClaim claim;
  int32_t page_size;
  bool checks_itself;
  Phase phase = Phase::kIdle;
  cache::PageCache pages;
  StreamTable streams;
  StepData step;
  PlannedStep current;  // the last plan
  StepData early;       // taken; pre-admitted, where has_early
  bool has_early = false;
  PlannedStep early_plan;  // where early_planned: of `early`, then of the step that came from it
  bool early_planned = false;
  SlotBuffers slot_buffers;
  GraphShape largest = kLimits;  // of a bucket
  uint64_t last_plan_id = 0;
  // Scratch that keeps its memory from call to call.
  KvStep plain_step;
  StepData asked;                // what is being taken
  std::vector<int32_t> leaving;  // [num_pages], zero between calls: streams that leave a page
  std::vector<PageCopy> copies;
  uint64_t num_resolved = 0;

 private:
  void resolve(const KvStep& wanted, StepData& data, const char* where);
  void resolve_segments(std::span<const Segment> segments, StepData& data, const char* where);
  void resolve_labels(const KvStep& wanted, StepData& data, const char* where);
  StreamState& resolve_stream(const KvStream& name, const std::string& what, const char* where);
  StreamState& make_pending(const KvStream& name, const std::string& what, const char* where);
  AdmitResult probe(const KvStep& wanted, StepData& data, int64_t available, const char* where);
  AdmitResult measure(StepData& data, int64_t available);
  void reserve(StepData& data);
  std::vector<StreamTable::Node> take_out_targets(const StepData& data);
  void put_back_targets(std::vector<StreamTable::Node>& targets);
  void undo_forks(StepData& data);
  void release_early();
  void release_streams();
};

}  // namespace mla::engine
