#include "engine/kv_state.hpp"

#include <algorithm>

#include "mla/error.hpp"

namespace mla::engine {

using cache::kNoPage;

std::string quoted(std::string_view text) {
  std::string result(1, '"');
  result += text;
  result += '"';
  return result;
}

std::string name_of_stream(RequestId request, std::string_view label) {
  return "request " + std::to_string(request) + ", label " + quoted(label);
}

namespace {

// Keys of one label never meet those of another: the same tokens have other rows there.
PageKey with_label(const PageKey& key, int32_t label) {
  return {key.high, detail::mix_bits(key.low + 0x9e3779b97f4a7c15U * static_cast<uint64_t>(label))};
}

bool built_with_assertions() {
#ifdef NDEBUG
  return false;
#else
  return true;
#endif
}

}  // namespace

KvState::KvState(LatentPool& lent_pool, const KvOptions& options)
    : pool(lent_pool),
      page_size(lent_pool.config().page_size),
      checks_itself(options.check_every_call.value_or(built_with_assertions())),
      pages(static_cast<int32_t>(lent_pool.config().num_pages)),
      leaving(lent_pool.config().num_pages, 0) {}

const StreamState& KvState::get(const KvStream& name, const char* where) const {
  const StreamState* stream = streams.find(name.request, name.label);
  if (stream == nullptr) {
    throw_invalid({"stream", where, "an open stream", name_of_stream(name.request, name.label)});
  }
  return *stream;
}

StreamState& KvState::get_outside_step(const KvStream& name, const char* where) {
  StreamState& stream = get(name, where);
  require_outside_step(stream, where);
  return stream;
}

void KvState::require_absent(const KvStream& name, const char* what, const char* where) const {
  if (streams.find(name.request, name.label) == nullptr) return;
  throw_invalid({what, where, "a stream that is not open",
                 name_of_stream(name.request, name.label) + ", which is"});
}

void KvState::require_phase(Phase wanted, const char* where) const {
  if (phase == wanted) return;
  constexpr const char* kNames[] = {"no step", "an admitted step", "a planned step"};
  throw_state({"step", where, kNames[static_cast<int>(wanted)], kNames[static_cast<int>(phase)]});
}

void KvState::require_outside_step(const StreamState& stream, const char* where) const {
  if (!stream.in_step) return;
  throw_state({"stream", where, "a stream outside the current step (commit or abandon it first)",
               name_of_stream(stream.request, streams.label_name(stream.label))});
}

void KvState::resolve(std::span<const Segment> segments, std::vector<StepEntry>& entries) {
  constexpr const char* kWhere = "KvResource::admit";
  const auto refuse = [&](size_t i, const char* part, std::string expected, std::string got) {
    throw_invalid({"segments[" + std::to_string(i) + "]" + part, kWhere, std::move(expected),
                   std::move(got)});
  };
  entries.clear();
  ++num_resolved;
  int64_t num_rows = 0;
  int64_t num_listed = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    StreamState* stream = streams.find(segment.request, segment.label);
    if (stream == nullptr) {
      refuse(i, "", "an open stream", name_of_stream(segment.request, segment.label));
    }
    if (std::exchange(stream->seen_in, num_resolved) == num_resolved) {
      refuse(i, "", "each stream once", name_of_stream(segment.request, segment.label) + " again");
    }
    if (segment.span < 0) refuse(i, ".span", "0 or more", std::to_string(segment.span));
    const int64_t length = stream->length + segment.span;
    if (length > INT32_MAX) {
      refuse(i, ".span", "a length of at most 2147483647 tokens", std::to_string(length));
    }
    num_rows += segment.span;
    num_listed += pages_of(length, page_size);
    if (num_rows > kMaxTokens) {
      refuse(i, ".span", "at most 2147483647 rows in a step", std::to_string(num_rows));
    }
    if (num_listed > kMaxListedPages) {
      refuse(i, "", "at most 2147483647 pages listed in a step", std::to_string(num_listed));
    }
    entries.push_back({.stream = stream, .span = segment.span});
  }
}

// Fills in what each entry needs; the pages of the last holder of a page are its own, so of several
// streams that leave one page in the step the last may stay.
AdmitResult KvState::measure(std::span<StepEntry> entries) {
  AdmitResult result;
  int64_t available = pages.num_available();
  for (StepEntry& entry : entries) {
    const StreamState& stream = *entry.stream;
    entry.new_pages =
        pages_of(stream.length + entry.span, page_size) - static_cast<int64_t>(stream.pages.size());
    int64_t needed = entry.new_pages;
    if (entry.span > 0 && stream.length % page_size != 0) {
      const int32_t tail = stream.pages[stream.length / page_size];
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
  for (const StepEntry& entry : entries) {
    if (entry.tail_copy == TailCopy::kNone) continue;
    leaving[entry.stream->pages[entry.stream->length / page_size]] = 0;
  }
  return result;
}

// What must be had first; then copies that only keep a page cached, as long as there is room.
void KvState::reserve(std::span<StepEntry> entries) {
  for (const StepEntry& entry : entries) {
    StreamState& stream = *entry.stream;
    stream.in_step = true;
    for (int64_t i = 0; i < entry.new_pages; ++i) stream.pages.push_back(pages.take());
    if (entry.tail_copy == TailCopy::kNeeded) stream.copy_page = pages.take();
  }
  for (const StepEntry& entry : entries) {
    if (entry.tail_copy != TailCopy::kIfRoom) continue;
    StreamState& stream = *entry.stream;
    if (pages.num_available() > 0) {
      stream.copy_page = pages.take();
    } else {
      pages.forget(stream.pages[stream.length / page_size]);
    }
  }
}

void KvState::copy_tails(Stream device_stream) {
  copies.clear();
  for (const StepEntry& entry : step) {
    const StreamState& state = *entry.stream;
    if (state.copy_page == kNoPage) continue;
    copies.push_back({.from = state.pages[state.length / page_size], .to = state.copy_page});
  }
  pool.copy_pages(copies, device_stream);
  for (const StepEntry& entry : step) {
    StreamState& state = *entry.stream;
    if (state.copy_page == kNoPage) continue;
    pages.drop(std::exchange(state.pages[state.length / page_size],
                             std::exchange(state.copy_page, kNoPage)));
  }
}

// Where the index knows the key, its page takes the place of the stream's own. Not where others
// hold that one too: the pages behind it may be theirs as well, and whoever holds an indexed page
// must hold the one before it. Stops there, at a page that the index has under another key, and at
// a key that collides: what follows could not be found behind it.
void KvState::index_full_pages(StreamState& stream) {
  const int64_t num_full =
      std::min(stream.length / page_size, static_cast<int64_t>(stream.page_keys.size()));
  for (int64_t& i = stream.num_indexed; i < num_full; ++i) {
    const int32_t own = stream.pages[i];
    const int32_t parent = i == 0 ? kNoPage : stream.pages[i - 1];
    const int32_t known = pages.find(stream.page_keys[i], parent);
    if (known == own) continue;
    if (known == kNoPage) {
      if (pages.is_indexed(own) || !pages.enter(stream.page_keys[i], parent, own)) return;
    } else {
      if (pages.refs(own) > 1) return;
      pages.hold(known);
      pages.drop(own);
      stream.pages[i] = known;
    }
  }
}

void KvState::add_page_keys(StreamState& stream, std::span<const PageKey> keys) {
  for (const PageKey& key : keys) stream.page_keys.push_back(with_label(key, stream.label));
}

void KvState::attach_prefix(StreamState& stream, int64_t num_tokens) {
  const int64_t num_keys =
      std::min(num_tokens / page_size, static_cast<int64_t>(stream.page_keys.size()));
  int32_t page = kNoPage;
  for (int64_t i = 0; i < num_keys; ++i) {
    page = pages.find(stream.page_keys[i], page);
    if (page == kNoPage) break;
    stream.pages.push_back(page);
  }
  const int64_t num_matched = static_cast<int64_t>(stream.pages.size()) * page_size;
  stream.length = std::min(num_matched, std::max<int64_t>(num_tokens - 1, 0));
  stream.pages.resize(pages_of(stream.length, page_size));
  stream.num_indexed = stream.length / page_size;
  for (const int32_t held : stream.pages) pages.hold(held);
}

void KvState::drop_past_length(StreamState& stream) {
  const auto num_kept = static_cast<size_t>(pages_of(stream.length, page_size));
  pages.drop_backwards(std::span(stream.pages).subspan(num_kept));
  stream.pages.resize(num_kept);
}

void KvState::end_step() {
  for (const StepEntry& entry : step) entry.stream->in_step = false;
  step.clear();
  phase = Phase::kIdle;
}

}  // namespace mla::engine
