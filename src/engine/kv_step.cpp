#include "engine/kv_step.hpp"

#include <algorithm>

namespace mla::engine {

// Few labels, so one pass over the step for each of them.
void StepLayout::order_by_label(std::span<const StepEntry> step) {
  labels_.clear();
  for (const StepEntry& entry : step) {
    if (std::find(labels_.begin(), labels_.end(), entry.stream->label) == labels_.end()) {
      labels_.push_back(entry.stream->label);
    }
  }
  packed_.clear();
  for (const int32_t label : labels_) {
    for (const StepEntry& entry : step) {
      if (entry.stream->label == label) packed_.push_back(&entry);
    }
  }
}

void StepLayout::build(std::span<const StepEntry> step, const StreamTable& streams,
                       int32_t page_size) {
  order_by_label(step);
  int64_t num_rows = 0;
  int64_t num_listed = 0;
  for (const StepEntry& entry : step) {
    num_rows += entry.span;
    num_listed += pages_of(entry.stream->length + entry.span, page_size);
  }
  // Sized before they are filled: the plans point into them.
  const size_t num_offsets = step.size() + labels_.size();
  plans_.clear();
  views_.resize(step.size());
  qo_indptr_.resize(num_offsets);
  kv_indptr_.resize(num_offsets);
  kv_indices_.resize(num_listed);
  kv_len_.resize(step.size());
  last_page_len_.resize(step.size());
  slots_.resize(num_rows);

  size_t begin = 0;  // of the label, in packed_
  int64_t row = 0;
  int64_t listed = 0;
  for (size_t l = 0; l < labels_.size(); ++l) {
    size_t end = begin;
    const size_t offsets = begin + l;
    const int64_t first_row = row;
    const int64_t first_listed = listed;
    qo_indptr_[offsets] = kv_indptr_[offsets] = 0;
    for (; end < packed_.size() && packed_[end]->stream->label == labels_[l]; ++end) {
      const StreamState& stream = *packed_[end]->stream;
      const int32_t span = packed_[end]->span;
      const int64_t length = stream.length + span;
      const int64_t num_pages = pages_of(length, page_size);
      int32_t* pages = kv_indices_.data() + listed;
      std::copy_n(stream.pages.begin(), num_pages, pages);
      for (int64_t token = stream.length; token < length; ++token) {
        slots_[row++] = int64_t{pages[token / page_size]} * page_size + token % page_size;
      }
      listed += num_pages;
      views_[end] = {.request = stream.request,
                     .label = streams.label_name(stream.label),
                     .pages = {pages, static_cast<size_t>(num_pages)},
                     .start = stream.length,
                     .to_compute = span,
                     .length = length};
      qo_indptr_[end + l + 1] = static_cast<int32_t>(row - first_row);
      kv_indptr_[end + l + 1] = static_cast<int32_t>(listed - first_listed);
      kv_len_[end] = static_cast<int32_t>(length);
      last_page_len_[end] =
          num_pages == 0 ? 0 : static_cast<int32_t>(length - (num_pages - 1) * page_size);
    }
    const size_t count = end - begin;
    plans_.push_back({.label = streams.label_name(labels_[l]),
                      .views = {views_.data() + begin, count},
                      .qo_indptr = {qo_indptr_.data() + offsets, count + 1},
                      .kv_indptr = {kv_indptr_.data() + offsets, count + 1},
                      .kv_indices = {kv_indices_.data() + first_listed,
                                     static_cast<size_t>(listed - first_listed)},
                      .kv_len = {kv_len_.data() + begin, count},
                      .kv_last_page_len = {last_page_len_.data() + begin, count},
                      .slots = {slots_.data() + first_row, static_cast<size_t>(row - first_row)}});
    begin = end;
  }
}

}  // namespace mla::engine
