#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string_view>
#include <vector>

#include "engine/stream_table.hpp"
#include "mla/kv_step.hpp"

namespace mla::engine {

/// What the step does about the page that a stream's next row goes to.
enum class TailCopy : uint8_t {
  kNone,    // the stream alone holds it, or the next row starts a page
  kNeeded,  // others hold it: the stream gets a copy
  kIfRoom,  // only the prefix index holds it too: a copy, or the index forgets the page
};

/// One segment, resolved.
struct StepEntry {
  StreamState* stream = nullptr;
  int64_t start = 0;  // tokens that are stored when the step begins
  int32_t span = 0;
  int64_t new_pages = 0;  // taken for it, besides the copy
  TailCopy tail_copy = TailCopy::kNone;
  int32_t copy_page = cache::kNoPage;  // taken for the copy of the page that row `start` is in
};

struct StepFork {
  StreamState* source = nullptr;
  StreamState* target = nullptr;  // made when the step is admitted, pending until it is real
};

/// Labels that share a plan.
struct StepGroup {
  int32_t name = 0;
  std::vector<int32_t> labels;
};

/// A step, resolved, and what was taken for it. Reused from step to step.
struct StepData {
  std::vector<StepEntry> entries;
  std::vector<int32_t> taken;  // new pages of all entries in turn
  std::vector<StepFork> forks_before, forks_after;
  std::vector<StepGroup> combined;
  std::vector<int32_t> labels;  // planned in any case

  void clear();
};

/// Whether `step` is what `data` was resolved from.
bool is_same_step(const KvStep& step, const StepData& data, const StreamTable& streams);

/// The arrays of a planned step, one piece for each label. Reused from step to step.
class StepLayout {
 public:
  /// Lays the step out label by label, in the order in which labels first appear. Pages are the
  /// stream's, with the copied page in its place, and the taken ones that the stream has not got
  /// yet. Each label has `min_slots` slots at least.
  void build(const StepData& step, const StreamTable& streams, int32_t page_size,
             int64_t min_slots);
  std::span<const LabelPlan> plans() const { return plans_; }

 private:
  // What one plan packs.
  struct Group {
    int32_t name = 0;
    std::span<const int32_t> labels;
    size_t begin = 0;  // in packed_
  };
  struct Packed {
    const StepEntry* entry = nullptr;
    size_t taken_begin = 0;
  };

  void order_by_label(const StepData& step);
  void add_group(const StepData& step, int32_t label);
  void size_arrays(const StepData& step, int32_t page_size, int64_t min_slots);
  static int64_t list_pages(const Packed& packed, std::span<const int32_t> taken, int32_t page_size,
                            int32_t* out);

  std::vector<LabelPlan> plans_;
  std::vector<Group> groups_;       // in order of appearance
  std::deque<int32_t> own_labels_;  // of the groups of one label; a deque, so that they stay
  std::vector<Packed> packed_;      // label-major
  std::vector<KvView> views_;
  std::vector<int32_t> qo_indptr_;
  std::vector<int32_t> kv_indptr_;
  std::vector<int32_t> kv_indices_;
  std::vector<int32_t> kv_len_;
  std::vector<int32_t> last_page_len_;
  std::vector<int64_t> slots_;
};

/// Pages that hold `tokens` tokens.
inline int64_t pages_of(int64_t tokens, int32_t page_size) {
  return (tokens + page_size - 1) / page_size;
}

}  // namespace mla::engine
