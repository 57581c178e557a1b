#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/stream_table.hpp"
#include "mla/kv_resource.hpp"

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
  int32_t span = 0;
  int64_t new_pages = 0;
  TailCopy tail_copy = TailCopy::kNone;
};

/// The arrays of a planned step, one piece for each label. Reused from step to step.
class StepLayout {
 public:
  /// Lays the step out label by label, in the order in which labels first appear. The streams hold
  /// all pages that they need.
  void build(std::span<const StepEntry> step, const StreamTable& streams, int32_t page_size);
  std::span<const LabelPlan> plans() const { return plans_; }

 private:
  void order_by_label(std::span<const StepEntry> step);

  std::vector<LabelPlan> plans_;
  std::vector<const StepEntry*> packed_;  // label-major
  std::vector<int32_t> labels_;           // in order of appearance
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
