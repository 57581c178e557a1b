#include <algorithm>
#include <cassert>
#include <string>
#include <utility>

#include "engine/kv_state.hpp"
#include "engine/text.hpp"
#include "mla/error.hpp"

namespace mla::engine {

using cache::kNoPage;

namespace {

template <class Fn>
void for_each_stream(const StepData& data, const Fn& fn) {
  for (const StepEntry& entry : data.entries) fn(*entry.stream);
  for (const auto* forks : {&data.forks_before, &data.forks_after}) {
    for (const StepFork& fork : *forks) {
      fn(*fork.source);
      fn(*fork.target);
    }
  }
}

std::string entry_name(const char* list, size_t i, const char* part) {
  return std::string(list) + "[" + std::to_string(i) + "]" + part;
}

}  // namespace

AdmitResult KvState::take(const KvStep& wanted, const char* where) {
  int64_t available = pages.num_available() + std::ssize(early.taken);
  for (const StepEntry& entry : early.entries) available += entry.copy_page != kNoPage ? 1 : 0;
  // Out of the way of the names of `wanted`, until it is known which of the two steps stays.
  std::vector<StreamTable::Node> early_targets = take_out_targets(early);
  AdmitResult result;
  try {
    result = probe(wanted, asked, available, where);
  } catch (...) {
    put_back_targets(early_targets);
    throw;
  }
  if (!result) {
    put_back_targets(early_targets);
    return result;
  }
  release_early();
  early.clear();
  reserve(asked);
  std::swap(early, asked);
  return result;
}

// Resolves the step and says what it lacks. Where it throws, or lacks something, nothing is left.
AdmitResult KvState::probe(const KvStep& wanted, StepData& data, int64_t available,
                           const char* where) {
  AdmitResult result;
  try {
    resolve(wanted, data, where);
    result = measure(data, available);
  } catch (...) {
    undo_forks(data);
    data.clear();
    throw;
  }
  if (!result) {
    undo_forks(data);
    data.clear();
  }
  return result;
}

void KvState::resolve(const KvStep& wanted, StepData& data, const char* where) {
  for (size_t i = 0; i < wanted.forks_before.size(); ++i) {
    const auto name = [i](const char* part) { return entry_name("forks_before", i, part); };
    StreamState& source = resolve_stream(wanted.forks_before[i].source, name(".source"), where);
    require_outside_step(source, where);
    StreamState& target = make_pending(wanted.forks_before[i].target, name(".target"), where);
    data.forks_before.push_back({.source = &source, .target = &target});
    copy_content(source, target);
  }
  resolve_labels(wanted, data, where);
  resolve_segments(wanted.segments, data, where);
  for (size_t i = 0; i < wanted.forks_after.size(); ++i) {
    const auto name = [i](const char* part) { return entry_name("forks_after", i, part); };
    StreamState& source = resolve_stream(wanted.forks_after[i].source, name(".source"), where);
    StreamState& target = make_pending(wanted.forks_after[i].target, name(".target"), where);
    data.forks_after.push_back({.source = &source, .target = &target});
  }
}

// A pending stream that is found here is this step's own: other steps' are dropped before, or are
// known by forks_at_commit.
StreamState& KvState::resolve_stream(const KvStream& name, const std::string& what,
                                     const char* where) {
  StreamState* stream = streams.find(name.request, name.label);
  if (stream == nullptr) {
    throw_invalid({what, where, "an open stream", name_of_stream(name.request, name.label)});
  }
  if (stream->forks_at_commit) {
    throw_state({what, where, "a stream that the step in flight does not fork at its commit",
                 name_of_stream(name.request, name.label)});
  }
  return *stream;
}

StreamState& KvState::make_pending(const KvStream& name, const std::string& what,
                                   const char* where) {
  require_absent(name, what, where);
  StreamState& stream = streams.insert(name.request, name.label);
  stream.pending = true;
  return stream;
}

void KvState::resolve_segments(std::span<const Segment> segments, StepData& data,
                               const char* where) {
  const auto refuse = [&](size_t i, const char* part, std::string expected, std::string got) {
    throw_invalid({entry_name("segments", i, part), where, std::move(expected), std::move(got)});
  };
  ++num_resolved;
  int64_t num_rows = 0;
  int64_t num_listed = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    StreamState* stream = streams.find(segment.request, segment.label);
    if (stream == nullptr || stream->forks_at_commit) {
      stream =
          &resolve_stream({segment.request, segment.label}, entry_name("segments", i, ""), where);
    }
    if (std::exchange(stream->seen_in, num_resolved) == num_resolved) {
      refuse(i, "", "each stream once", name_of_stream(segment.request, segment.label) + " again");
    }
    if (segment.span < 0) refuse(i, ".span", "0 or more", std::to_string(segment.span));
    const int64_t start = stream->length + stream->step_span;
    const int64_t length = start + segment.span;
    if (length > kMaxKeys) {
      refuse(i, ".span", "a length of at most " + std::to_string(kMaxKeys) + " tokens",
             std::to_string(length));
    }
    num_rows += segment.span;
    num_listed += pages_of(length, page_size);
    if (num_rows > kMaxTokens) {
      refuse(i, ".span", "at most 2147483647 rows in a step", std::to_string(num_rows));
    }
    if (num_listed > kMaxListedPages) {
      refuse(i, "", "at most 2147483647 pages listed in a step", std::to_string(num_listed));
    }
    data.entries.push_back({.stream = stream, .start = start, .span = segment.span});
  }
}

void KvState::resolve_labels(const KvStep& wanted, StepData& data, const char* where) {
  for (const std::string_view label : wanted.labels)
    data.labels.push_back(streams.number_of(label));
  for (size_t i = 0; i < wanted.combined.size(); ++i) {
    const CombinedLabel& group = wanted.combined[i];
    const auto refuse = [&](const char* part, const char* expected, std::string_view got) {
      throw_invalid({entry_name("combined", i, part), where, expected, quoted(got)});
    };
    if (group.labels.empty()) refuse(".labels", "one label or more", "");
    const auto is_member = [&](std::string_view label) {
      return std::ranges::find(group.labels, label) != group.labels.end();
    };
    const auto takes_the_name = [&](std::string_view label) {
      return label == group.name && !is_member(label);
    };
    if (std::ranges::any_of(wanted.labels, takes_the_name) ||
        std::ranges::any_of(wanted.segments, takes_the_name, &Segment::label)) {
      refuse(".name", "a name that no other label of the step has", group.name);
    }
    StepGroup resolved{.name = streams.number_of(group.name), .labels = {}};
    for (const StepGroup& other : data.combined) {
      if (other.name == resolved.name) refuse(".name", "a name of its own", group.name);
    }
    for (const std::string_view label : group.labels) {
      const int32_t number = streams.number_of(label);
      const auto has_it = [&](const StepGroup& other) {
        return std::ranges::find(other.labels, number) != other.labels.end();
      };
      if (has_it(resolved) || std::ranges::any_of(data.combined, has_it)) {
        refuse(".labels", "each label combined once", label);
      }
      resolved.labels.push_back(number);
    }
    data.combined.push_back(std::move(resolved));
  }
}

// Fills in what each entry needs; the pages of the last holder of a page are its own, so of several
// streams that leave one page in the step the last may stay.
AdmitResult KvState::measure(StepData& data, int64_t available) {
  AdmitResult result;
  for (StepEntry& entry : data.entries) {
    const StreamState& stream = *entry.stream;
    entry.new_pages =
        pages_of(entry.start + entry.span, page_size) - static_cast<int64_t>(stream.pages.size());
    int64_t needed = entry.new_pages;
    if (entry.span > 0 && entry.start % page_size != 0) {
      const int32_t tail = stream.pages[entry.start / page_size];
      const int32_t holders = pages.refs(tail) - leaving[tail];
      if (holders > 1) {
        ++leaving[tail];
        const bool only_index = holders == 2 && pages.is_indexed(tail);
        entry.tail_copy = only_index ? TailCopy::kIfRoom : TailCopy::kNeeded;
        needed += only_index ? 0 : 1;
      }
    }
    const int64_t lacking = needed - std::min(needed, available);
    available -= needed - lacking;
    if (lacking == 0) continue;
    result.pages_short += lacking;
    result.shortages.push_back(
        {stream.request, std::string(streams.label_name(stream.label)), lacking});
  }
  for (const StepEntry& entry : data.entries) {
    if (entry.tail_copy == TailCopy::kNone) continue;
    leaving[entry.stream->pages[entry.start / page_size]] = 0;
  }
  return result;
}

// What must be had first; then copies that only keep a page cached, as long as there is room.
void KvState::reserve(StepData& data) {
  for (StepEntry& entry : data.entries) {
    for (int64_t i = 0; i < entry.new_pages; ++i) data.taken.push_back(pages.take());
    if (entry.tail_copy == TailCopy::kNeeded) entry.copy_page = pages.take();
  }
  for (StepEntry& entry : data.entries) {
    if (entry.tail_copy != TailCopy::kIfRoom) continue;
    if (pages.num_available() > 0) {
      entry.copy_page = pages.take();
    } else {
      pages.forget(entry.stream->pages[entry.start / page_size]);
    }
  }
}

void KvState::adopt_early() {
  std::swap(step, early);
  early.clear();
  has_early = false;
  for_each_stream(step, [](StreamState& stream) {
    stream.in_step = true;
    stream.in_early = false;
  });
  for (const StepFork& fork : step.forks_after) {
    fork.source->forks_at_commit = fork.target->forks_at_commit = true;
  }
  auto taken = step.taken.begin();
  for (const StepEntry& entry : step.entries) {
    assert(entry.start == entry.stream->length);
    entry.stream->step_span = entry.span;
    entry.stream->pages.insert(entry.stream->pages.end(), taken, taken + entry.new_pages);
    taken += entry.new_pages;
  }
  phase = Phase::kAdmitted;
}

// Sources hold every page that a target does, so that no page becomes free.
std::vector<StreamTable::Node> KvState::take_out_targets(const StepData& data) {
  std::vector<StreamTable::Node> targets;
  targets.reserve(data.forks_before.size() + data.forks_after.size());
  for (const auto* forks : {&data.forks_before, &data.forks_after}) {
    for (const StepFork& fork : *forks) {
      pages.drop_backwards(fork.target->pages);
      targets.push_back(streams.take_out(*fork.target));
    }
  }
  return targets;
}

void KvState::put_back_targets(std::vector<StreamTable::Node>& targets) {
  for (StreamTable::Node& target : targets) {
    for (const int32_t page : target.mapped().pages) pages.hold(page);
    streams.put_back(std::move(target));
  }
}

void KvState::undo_forks(StepData& data) {
  for (auto* forks : {&data.forks_after, &data.forks_before}) {
    for (; !forks->empty(); forks->pop_back()) {
      const StreamState& target = *forks->back().target;
      pages.drop_backwards(target.pages);
      streams.erase(target);
    }
  }
}

void KvState::keep_early() {
  has_early = true;
  for_each_stream(early, [](StreamState& stream) { stream.in_early = true; });
}

void KvState::drop_early() {
  if (!has_early) return;
  release_early();
  undo_forks(early);
  early.clear();
}

// All but the targets of its forks.
void KvState::release_early() {
  for_each_stream(early, [](StreamState& stream) { stream.in_early = false; });
  for (const StepEntry& entry : early.entries) {
    if (entry.copy_page != kNoPage) pages.drop(entry.copy_page);
  }
  pages.drop_backwards(early.taken);
  has_early = early_planned = false;
}

void KvState::give_back() {
  for (const StepEntry& entry : step.entries) {
    drop_past_length(*entry.stream);
    if (entry.copy_page != kNoPage) pages.drop(entry.copy_page);
  }
  early_planned = false;  // of a step that was admitted early
  release_streams();
  undo_forks(step);  // from here on some entries name streams that are gone
  step.clear();
  phase = Phase::kIdle;
}

void KvState::release_streams() {
  for_each_stream(step, [](StreamState& stream) {
    stream.in_step = stream.forks_at_commit = stream.pending = false;
    stream.step_span = 0;
  });
}

void KvState::end_step() {
  release_streams();
  step.clear();
  phase = Phase::kIdle;
}

}  // namespace mla::engine
