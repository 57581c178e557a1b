#include "engine/step_layout.hpp"

#include <algorithm>

namespace mla::engine {

void StepData::clear() {
  entries.clear();
  taken.clear();
  forks_before.clear();
  forks_after.clear();
  combined.clear();
  labels.clear();
}

bool is_same_step(const KvStep& step, const StepData& data, const StreamTable& streams) {
  const auto is_stream = [&](const StreamState& state, RequestId request, std::string_view label) {
    return state.request == request && streams.label_name(state.label) == label;
  };
  const auto same_entry = [&](const Segment& segment, const StepEntry& entry) {
    return segment.span == entry.span && is_stream(*entry.stream, segment.request, segment.label);
  };
  const auto same_fork = [&](const Fork& fork, const StepFork& known) {
    return is_stream(*known.source, fork.source.request, fork.source.label) &&
           is_stream(*known.target, fork.target.request, fork.target.label);
  };
  const auto same_label = [&](std::string_view label, int32_t known) {
    return streams.label_name(known) == label;
  };
  const auto same_group = [&](const CombinedLabel& group, const StepGroup& known) {
    return same_label(group.name, known.name) &&
           std::ranges::equal(group.labels, known.labels, same_label);
  };
  return std::ranges::equal(step.segments, data.entries, same_entry) &&
         std::ranges::equal(step.forks_before, data.forks_before, same_fork) &&
         std::ranges::equal(step.forks_after, data.forks_after, same_fork) &&
         std::ranges::equal(step.combined, data.combined, same_group) &&
         std::ranges::equal(step.labels, data.labels, same_label);
}

// The label's group, unless it is there.
void StepLayout::add_group(const StepData& step, int32_t label) {
  const auto has_label = [label](const auto& group) {
    return std::ranges::find(group.labels, label) != group.labels.end();
  };
  if (std::ranges::any_of(groups_, has_label)) return;
  const auto combined = std::ranges::find_if(step.combined, has_label);
  if (combined != step.combined.end()) {
    groups_.push_back({.name = combined->name, .labels = combined->labels});
  } else {
    own_labels_.push_back(label);
    groups_.push_back({.name = label, .labels = {&own_labels_.back(), 1}});
  }
}

// Few labels, so one pass over the step for each of them.
void StepLayout::order_by_label(const StepData& step) {
  groups_.clear();
  own_labels_.clear();
  for (const StepEntry& entry : step.entries) add_group(step, entry.stream->label);
  for (const int32_t label : step.labels) add_group(step, label);
  for (const StepGroup& group : step.combined) add_group(step, group.labels.front());
  packed_.clear();
  for (Group& group : groups_) {
    group.begin = packed_.size();
    for (const int32_t label : group.labels) {
      size_t taken = 0;
      for (const StepEntry& entry : step.entries) {
        if (entry.stream->label == label) packed_.push_back({&entry, taken});
        taken += static_cast<size_t>(entry.new_pages);
      }
    }
  }
}

// Before the arrays are filled: the plans point into them.
void StepLayout::size_arrays(const StepData& step, int32_t page_size, int64_t min_slots) {
  int64_t num_listed = 0;
  int64_t num_slots = static_cast<int64_t>(groups_.size()) * min_slots;  // enough, if not exact
  for (const StepEntry& entry : step.entries) {
    num_listed += pages_of(entry.start + entry.span, page_size);
    num_slots += entry.span;
  }
  const size_t num_offsets = packed_.size() + groups_.size();
  views_.resize(packed_.size());
  qo_indptr_.resize(num_offsets);
  kv_indptr_.resize(num_offsets);
  kv_indices_.resize(num_listed);
  kv_len_.resize(packed_.size());
  last_page_len_.resize(packed_.size());
  slots_.resize(num_slots);
}

int64_t StepLayout::list_pages(const Packed& packed, std::span<const int32_t> taken,
                               int32_t page_size, int32_t* out) {
  const StepEntry& entry = *packed.entry;
  const std::vector<int32_t>& held = entry.stream->pages;
  const int64_t num_pages = pages_of(entry.start + entry.span, page_size);
  const int64_t num_held = std::min(num_pages, static_cast<int64_t>(held.size()));
  std::copy_n(held.begin(), num_held, out);
  std::copy_n(taken.begin() + packed.taken_begin, num_pages - num_held, out + num_held);
  if (entry.copy_page != cache::kNoPage) out[entry.start / page_size] = entry.copy_page;
  return num_pages;
}

void StepLayout::build(const StepData& step, const StreamTable& streams, int32_t page_size,
                       int64_t min_slots) {
  order_by_label(step);
  size_arrays(step, page_size, min_slots);
  plans_.clear();
  int64_t slot = 0;
  int64_t listed = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const size_t begin = groups_[g].begin;
    const size_t end = g + 1 < groups_.size() ? groups_[g + 1].begin : packed_.size();
    const size_t offsets = begin + g;
    const int64_t first_slot = slot;
    const int64_t first_listed = listed;
    qo_indptr_[offsets] = kv_indptr_[offsets] = 0;
    for (size_t i = begin; i < end; ++i) {
      const StepEntry& entry = *packed_[i].entry;
      const int64_t length = entry.start + entry.span;
      int32_t* pages = kv_indices_.data() + listed;
      const int64_t num_pages = list_pages(packed_[i], step.taken, page_size, pages);
      for (int64_t token = entry.start; token < length; ++token) {
        slots_[slot++] = int64_t{pages[token / page_size]} * page_size + token % page_size;
      }
      listed += num_pages;
      views_[i] = {.request = entry.stream->request,
                   .label = streams.label_name(entry.stream->label),
                   .pages = {pages, static_cast<size_t>(num_pages)},
                   .start = entry.start,
                   .to_compute = entry.span,
                   .length = length};
      qo_indptr_[i + g + 1] = static_cast<int32_t>(slot - first_slot);
      kv_indptr_[i + g + 1] = static_cast<int32_t>(listed - first_listed);
      kv_len_[i] = static_cast<int32_t>(length);
      last_page_len_[i] =
          num_pages == 0 ? 0 : static_cast<int32_t>(length - (num_pages - 1) * page_size);
    }
    while (slot - first_slot < min_slots) slots_[slot++] = -1;
    const size_t count = end - begin;
    plans_.push_back(
        {.label = streams.label_name(groups_[g].name),
         .views = {views_.data() + begin, count},
         .qo_indptr = {qo_indptr_.data() + offsets, count + 1},
         .kv_indptr = {kv_indptr_.data() + offsets, count + 1},
         .kv_indices = {kv_indices_.data() + first_listed,
                        static_cast<size_t>(listed - first_listed)},
         .kv_len = {kv_len_.data() + begin, count},
         .kv_last_page_len = {last_page_len_.data() + begin, count},
         .slots = {slots_.data() + first_slot, static_cast<size_t>(slot - first_slot)}});
  }
}

}  // namespace mla::engine
