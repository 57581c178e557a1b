#include "engine/attention_rows.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/text.hpp"
#include "mla/error.hpp"

namespace mla::engine {
namespace {

[[noreturn]] void refuse(std::string what, std::string expected, std::string got) {
  throw_invalid({.what = std::move(what),
                 .where = "AttentionResource::plan",
                 .expected = std::move(expected),
                 .got = std::move(got)});
}

std::string name_of_pass(int32_t pass) { return "passes[" + std::to_string(pass) + "]"; }

// Segments of one pass in the order of a label's rows: a row takes the next segment of its label.
class Pairing {
 public:
  Pairing(const AttentionPass& pass, int32_t index) : pass_(pass), index_(index) {}

  const QuerySegment& next(std::string_view label) {
    if (label != label_) start(label);
    skip_others();
    ++rows_;
    if (at_ == pass_.segments.size()) refuse_counts(rows_ - 1);
    return pass_.segments[at_++];
  }
  // Every segment of the last label has met its row.
  void finish() {
    skip_others();
    size_t left = 0;
    for (; at_ < pass_.segments.size(); ++at_) left += pass_.segments[at_].label == label_ ? 1 : 0;
    if (left > 0) refuse_counts(rows_ + left);
  }
  std::string name_of_last() const {
    return name_of_pass(index_) + ".segments[" + std::to_string(at_ - 1) + "]";
  }

 private:
  void start(std::string_view label) {
    finish();
    label_ = label;
    at_ = rows_ = 0;
  }
  void skip_others() {
    while (at_ < pass_.segments.size() && pass_.segments[at_].label != label_) ++at_;
  }
  [[noreturn]] void refuse_counts(size_t segments) const {
    refuse(name_of_pass(index_) + ".segments of label " + quoted(label_),
           "as many as the KV plan has rows of it", std::to_string(segments) + " segments");
  }

  const AttentionPass& pass_;
  int32_t index_;
  std::string_view label_;
  size_t at_ = 0, rows_ = 0;
};

// Whether the pass attends over this label.
bool covers(const AttentionPass& pass, const LabelPlan& label) {
  if (pass.segments.empty() || label.views.empty()) return true;
  return std::any_of(label.views.begin(), label.views.end(), [&](const KvView& view) {
    return std::any_of(pass.segments.begin(), pass.segments.end(),
                       [&](const QuerySegment& segment) { return segment.label == view.label; });
  });
}

// How many of the row's new tokens the segment's queries see.
int64_t appended_seen(const AttentionPass& pass, const QuerySegment& segment, const KvView& view,
                      const Pairing& pairing) {
  if (pass.context_only) return 0;
  const int64_t seen = segment.num_appended.value_or(static_cast<int32_t>(view.to_compute));
  if (seen < 0 || seen > view.to_compute) {
    refuse(pairing.name_of_last() + ".num_appended",
           "0 to " + std::to_string(view.to_compute) + ", what the row appends",
           std::to_string(seen));
  }
  return seen;
}

void lay_out_rows(const LabelPlan& label, const AttentionPass& pass, int64_t page_size,
                  PassRows& rows) {
  Pairing pairing(pass, rows.pass);
  rows.qo_indptr.assign(1, 0);
  rows.kv_indptr.assign(1, 0);
  rows.kv_indices.clear();
  rows.kv_len.clear();
  int64_t num_queries = 0;
  for (const KvView& view : label.views) {
    const QuerySegment& segment = pairing.next(view.label);
    if (segment.num_queries < 0) {
      refuse(pairing.name_of_last() + ".num_queries", "at least 0",
             std::to_string(segment.num_queries));
    }
    num_queries += segment.num_queries;
    if (num_queries > kMaxTokens) {
      refuse("queries up to " + pairing.name_of_last(), "at most " + std::to_string(kMaxTokens),
             std::to_string(num_queries));
    }
    const int64_t length = view.start + appended_seen(pass, segment, view, pairing);
    const auto pages = view.pages.first(static_cast<size_t>((length + page_size - 1) / page_size));
    rows.kv_indices.insert(rows.kv_indices.end(), pages.begin(), pages.end());
    rows.qo_indptr.push_back(static_cast<int32_t>(num_queries));
    rows.kv_indptr.push_back(static_cast<int32_t>(rows.kv_indices.size()));
    rows.kv_len.push_back(static_cast<int32_t>(length));
  }
  if (!label.views.empty()) pairing.finish();
  rows.batch = {.qo_indptr = rows.qo_indptr,
                .kv_indptr = rows.kv_indptr,
                .kv_indices = rows.kv_indices,
                .kv_len = rows.kv_len,
                .kv_last_page_len = {}};
}

void check_pass(const AttentionPass& pass, int32_t index, const KvPlan& kv) {
  if (pass.context_only && pass.segments.empty()) {
    for (const LabelPlan& label : kv.labels) {
      if (label.views.empty()) continue;
      refuse(name_of_pass(index) + ".segments",
             "query counts for the " + std::to_string(label.views.size()) + " rows of label " +
                 quoted(label.label) + ", since the pass is context-only",
             "none");
    }
  }
  for (size_t i = 0; i < pass.segments.size(); ++i) {
    const auto has_row = [&](const KvView& view) { return view.label == pass.segments[i].label; };
    const bool known = std::any_of(kv.labels.begin(), kv.labels.end(), [&](const LabelPlan& plan) {
      return std::any_of(plan.views.begin(), plan.views.end(), has_row);
    });
    if (known) continue;
    refuse(name_of_pass(index) + ".segments[" + std::to_string(i) + "].label",
           "a label that the KV resource planned rows for", quoted(pass.segments[i].label));
  }
}

}  // namespace

PassRows& StepRows::next() {
  if (count_ == rows_.size()) rows_.emplace_back();
  return rows_[count_++];
}

void StepRows::lay_out(const KvPlan& kv, std::span<const AttentionPass> passes, int64_t page_size) {
  count_ = 0;
  for (size_t i = 0; i < passes.size(); ++i) {
    check_pass(passes[i], static_cast<int32_t>(i), kv);
  }
  for (const LabelPlan& label : kv.labels) {
    bool covered = false;
    for (size_t i = 0; i < passes.size(); ++i) {
      const AttentionPass& pass = passes[i];
      if (!covers(pass, label)) continue;
      covered = true;
      PassRows& rows = next();
      rows.label = label.label;
      rows.pass = static_cast<int32_t>(i);
      rows.causal = pass.causal && !pass.context_only;
      if (pass.segments.empty()) {
        rows.batch = label.batch();
      } else {
        lay_out_rows(label, pass, page_size, rows);
      }
    }
    if (!covered) {
      refuse("passes", "one that has segments of every label that is planned",
             "none with label " + quoted(label.label));
    }
  }
}

}  // namespace mla::engine
