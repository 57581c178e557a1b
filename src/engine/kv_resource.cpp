#include "mla/kv_resource.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "cache/page_cache.hpp"
#include "engine/kv_step.hpp"
#include "engine/stream_table.hpp"
#include "mla/error.hpp"

namespace mla {

using cache::kNoPage;
using engine::pages_of;
using engine::StepEntry;
using engine::StreamState;
using engine::TailCopy;

namespace {

std::string quoted(std::string_view text) {
  std::string result(1, '"');
  result += text;
  result += '"';
  return result;
}

std::string name_of_stream(RequestId request, std::string_view label) {
  return "request " + std::to_string(request) + ", label " + quoted(label);
}

// Keys of one label never meet those of another: the same tokens have other rows there.
PageKey with_label(const PageKey& key, int32_t label) {
  return {key.high, detail::mix_bits(key.low + 0x9e3779b97f4a7c15U * static_cast<uint64_t>(label))};
}

}  // namespace

struct KvResource::Impl {
  enum class Phase : uint8_t { kIdle, kAdmitted, kPlanned };

  Impl(LatentPool& lent_pool, const KvOptions& options)
      : pool(lent_pool),
        page_size(lent_pool.config().page_size),
        pages(static_cast<int32_t>(lent_pool.config().num_pages)),
        leaving(lent_pool.config().num_pages, 0) {
#ifdef NDEBUG
    checks_itself = options.check_every_call.value_or(false);
#else
    checks_itself = options.check_every_call.value_or(true);
#endif
  }

  const StreamState& get(const KvStream& name, const char* where) const;
  StreamState& get(const KvStream& name, const char* where) {
    return const_cast<StreamState&>(std::as_const(*this).get(name, where));
  }
  StreamState& get_idle(const KvStream& name, const char* where);
  void require_absent(const KvStream& name, const char* what, const char* where) const;
  void require_phase(Phase wanted, const char* where) const;
  void require_outside_step(const StreamState& stream, const char* where) const;

  void resolve(std::span<const Segment> segments, std::vector<StepEntry>& entries);
  AdmitResult measure(std::span<StepEntry> entries);
  void reserve(std::span<StepEntry> entries);
  void copy_tails(Stream stream);
  void index_full_pages(StreamState& stream);
  void add_keys(StreamState& stream, std::span<const PageKey> keys);
  void end_step();
  PageCounts check() const;
  void check_stream(const StreamState& stream) const;
  void after_change() const {
    if (checks_itself) check();
  }

  LatentPool& pool;
  int32_t page_size;
  bool checks_itself = false;
  Phase phase = Phase::kIdle;
  cache::PageCache pages;
  engine::StreamTable streams;
  engine::StepLayout layout;
  std::vector<StepEntry> step;
  // Scratch that keeps its memory from call to call.
  std::vector<StepEntry> resolved;
  std::vector<int32_t> leaving;  // [num_pages], zero: streams that leave the page for a copy
  std::vector<PageCopy> copies;
  uint64_t num_resolved = 0;
};

const StreamState& KvResource::Impl::get(const KvStream& name, const char* where) const {
  const StreamState* stream = streams.find(name.request, name.label);
  if (stream == nullptr) {
    throw_invalid({"stream", where, "an open stream", name_of_stream(name.request, name.label)});
  }
  return *stream;
}

StreamState& KvResource::Impl::get_idle(const KvStream& name, const char* where) {
  StreamState& stream = get(name, where);
  require_outside_step(stream, where);
  return stream;
}

void KvResource::Impl::require_absent(const KvStream& name, const char* what,
                                      const char* where) const {
  if (streams.find(name.request, name.label) == nullptr) return;
  throw_invalid({what, where, "a stream that is not open",
                 name_of_stream(name.request, name.label) + ", which is"});
}

void KvResource::Impl::require_phase(Phase wanted, const char* where) const {
  if (phase == wanted) return;
  constexpr const char* kNames[] = {"no step", "an admitted step", "a planned step"};
  throw_state({"step", where, kNames[static_cast<int>(wanted)], kNames[static_cast<int>(phase)]});
}

void KvResource::Impl::require_outside_step(const StreamState& stream, const char* where) const {
  if (!stream.in_step) return;
  throw_state({"stream", where, "a stream outside the current step (commit or abandon it first)",
               name_of_stream(stream.request, streams.label_name(stream.label))});
}

void KvResource::Impl::resolve(std::span<const Segment> segments, std::vector<StepEntry>& entries) {
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
AdmitResult KvResource::Impl::measure(std::span<StepEntry> entries) {
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
void KvResource::Impl::reserve(std::span<StepEntry> entries) {
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

void KvResource::Impl::copy_tails(Stream stream) {
  copies.clear();
  for (const StepEntry& entry : step) {
    const StreamState& state = *entry.stream;
    if (state.copy_page == kNoPage) continue;
    copies.push_back({.from = state.pages[state.length / page_size], .to = state.copy_page});
  }
  pool.copy_pages(copies, stream);
  for (const StepEntry& entry : step) {
    StreamState& state = *entry.stream;
    if (state.copy_page == kNoPage) continue;
    pages.drop(std::exchange(state.pages[state.length / page_size],
                             std::exchange(state.copy_page, kNoPage)));
  }
}

// Stops at a page that the index has under another key, or whose key collides: what follows could
// not be found behind it.
void KvResource::Impl::index_full_pages(StreamState& stream) {
  const int64_t num_full =
      std::min(stream.length / page_size, static_cast<int64_t>(stream.page_keys.size()));
  for (int64_t& i = stream.num_indexed; i < num_full; ++i) {
    const int32_t parent = i == 0 ? kNoPage : stream.pages[i - 1];
    const int32_t known = pages.find(stream.page_keys[i], parent);
    if (known == stream.pages[i]) continue;
    if (pages.is_indexed(stream.pages[i])) return;
    if (known != kNoPage) {
      pages.hold(known);
      pages.drop(std::exchange(stream.pages[i], known));
    } else if (!pages.enter(stream.page_keys[i], parent, stream.pages[i])) {
      return;
    }
  }
}

void KvResource::Impl::add_keys(StreamState& stream, std::span<const PageKey> keys) {
  for (const PageKey& key : keys) stream.page_keys.push_back(with_label(key, stream.label));
}

void KvResource::Impl::end_step() {
  for (const StepEntry& entry : step) entry.stream->in_step = false;
  step.clear();
  phase = Phase::kIdle;
}

PageCounts KvResource::Impl::check() const {
  std::vector<int32_t> holders(pages.num_pages(), 0);
  PageCounts counts;
  streams.for_each([&](const StreamState& stream) {
    check_stream(stream);
    for (const int32_t page : stream.pages) ++holders[page];
    counts.reserved +=
        static_cast<int64_t>(stream.pages.size()) - pages_of(stream.length, page_size);
    if (stream.copy_page == kNoPage) return;
    ++holders[stream.copy_page];
    ++counts.reserved;
  });
  pages.check(holders);
  for (int32_t page = 0; page < pages.num_pages(); ++page) {
    if (holders[page] == 0) {
      ++(pages.is_indexed(page) ? counts.cached : counts.free);
    } else {
      ++(pages.refs(page) == 1 ? counts.owned : counts.shared);
    }
  }
  counts.owned -= counts.reserved;  // each has one holder
  return counts;
}

void KvResource::Impl::check_stream(const StreamState& stream) const {
  const auto refuse = [&](std::string expected, std::string got) {
    throw_state({name_of_stream(stream.request, streams.label_name(stream.label)),
                 "KvResource::check", std::move(expected), std::move(got)});
  };
  const int64_t num_used = pages_of(stream.length, page_size);
  const auto num_held = static_cast<int64_t>(stream.pages.size());
  if (num_held < num_used || (!stream.in_step && num_held > num_used)) {
    refuse("the pages of its tokens, and more in a step only",
           std::to_string(num_held) + " pages for " + std::to_string(stream.length) + " tokens");
  }
  if (!stream.in_step && stream.copy_page != kNoPage) {
    refuse("a page for a copy in a step only", "page " + std::to_string(stream.copy_page));
  }
  for (int64_t i = num_used; i < num_held; ++i) {
    if (pages.refs(stream.pages[i]) == 1) continue;
    refuse("reserved pages of its own", "page " + std::to_string(stream.pages[i]) + " with " +
                                            std::to_string(pages.refs(stream.pages[i])) +
                                            " holders");
  }
  for (int64_t i = 0; i < stream.num_indexed; ++i) {
    const int32_t parent = i == 0 ? kNoPage : stream.pages[i - 1];
    if (pages.find(stream.page_keys[i], parent) == stream.pages[i]) continue;
    refuse("its first " + std::to_string(stream.num_indexed) + " pages in the prefix index",
           "page " + std::to_string(stream.pages[i]) + ", which is not there");
  }
}

KvResource::KvResource(LatentPool& pool, const KvOptions& options)
    : impl_(std::make_unique<Impl>(pool, options)) {}
KvResource::~KvResource() = default;
KvResource::KvResource(KvResource&&) noexcept = default;
KvResource& KvResource::operator=(KvResource&&) noexcept = default;

int64_t KvResource::open(const KvStream& stream, int64_t num_tokens,
                         std::span<const PageKey> page_keys) {
  constexpr const char* kWhere = "KvResource::open";
  impl_->require_absent(stream, "stream", kWhere);
  if (num_tokens < 0) {
    throw_invalid({"num_tokens", kWhere, "0 or more", std::to_string(num_tokens)});
  }
  StreamState& state = impl_->streams.insert(stream.request, stream.label);
  impl_->add_keys(state, page_keys);

  const int32_t page_size = impl_->page_size;
  const int64_t num_known_keys =
      std::min(num_tokens / page_size, static_cast<int64_t>(page_keys.size()));
  int32_t parent = kNoPage;
  for (int64_t i = 0; i < num_known_keys; ++i) {
    parent = impl_->pages.find(state.page_keys[i], parent);
    if (parent == kNoPage) break;
    state.pages.push_back(parent);
  }
  const int64_t num_matched = static_cast<int64_t>(state.pages.size()) * page_size;
  state.length = std::min(num_matched, std::max<int64_t>(num_tokens - 1, 0));
  state.pages.resize(pages_of(state.length, page_size));
  state.num_indexed = state.length / page_size;
  for (const int32_t page : state.pages) impl_->pages.hold(page);
  impl_->after_change();
  return state.length;
}

void KvResource::add_page_keys(const KvStream& stream, std::span<const PageKey> page_keys) {
  impl_->add_keys(impl_->get(stream, "KvResource::add_page_keys"), page_keys);
}

void KvResource::fork(const KvStream& source, const KvStream& target) {
  constexpr const char* kWhere = "KvResource::fork";
  const StreamState& from = impl_->get_idle(source, kWhere);
  impl_->require_absent(target, "target", kWhere);
  StreamState& to = impl_->streams.insert(target.request, target.label);
  to.length = from.length;
  to.pages = from.pages;
  for (const int32_t page : to.pages) impl_->pages.hold(page);
  if (to.label == from.label) {  // the keys of full pages; what follows may differ
    const auto num_full = static_cast<size_t>(from.length / impl_->page_size);
    to.page_keys.assign(from.page_keys.begin(),
                        from.page_keys.begin() + std::min(num_full, from.page_keys.size()));
    to.num_indexed = from.num_indexed;
  }
  impl_->after_change();
}

AdmitResult KvResource::admit(std::span<const Segment> segments) {
  constexpr const char* kWhere = "KvResource::admit";
  std::vector<StepEntry>& entries = impl_->resolved;
  if (impl_->phase == Impl::Phase::kPlanned) impl_->require_phase(Impl::Phase::kIdle, kWhere);
  impl_->resolve(segments, entries);
  if (impl_->phase == Impl::Phase::kAdmitted) {
    const auto same = [](const StepEntry& a, const StepEntry& b) {
      return a.stream == b.stream && a.span == b.span;
    };
    if (!std::equal(entries.begin(), entries.end(), impl_->step.begin(), impl_->step.end(), same)) {
      impl_->require_phase(Impl::Phase::kIdle, kWhere);
    }
    return {};
  }
  AdmitResult result = impl_->measure(entries);
  if (!result) return result;
  impl_->reserve(entries);
  impl_->step.swap(entries);
  impl_->phase = Impl::Phase::kAdmitted;
  impl_->after_change();
  return result;
}

std::span<const LabelPlan> KvResource::plan(Stream stream) {
  impl_->require_phase(Impl::Phase::kAdmitted, "KvResource::plan");
  impl_->copy_tails(stream);
  impl_->layout.build(impl_->step, impl_->streams, impl_->page_size);
  impl_->phase = Impl::Phase::kPlanned;
  impl_->after_change();
  return impl_->layout.plans();
}

const LabelPlan& KvResource::label_plan(std::string_view label) const {
  constexpr const char* kWhere = "KvResource::label_plan";
  impl_->require_phase(Impl::Phase::kPlanned, kWhere);
  for (const LabelPlan& plan : impl_->layout.plans()) {
    if (plan.label == label) return plan;
  }
  throw_invalid({"label", kWhere, "a label of the current step", quoted(label)});
}

void KvResource::write(int32_t layer, std::string_view label, const ConstTensor<2>& ckv,
                       const ConstTensor<2>& kpe, Stream stream) {
  impl_->pool.append(layer, label_plan(label).slots, ckv, kpe, stream);
}

void KvResource::commit() {
  impl_->require_phase(Impl::Phase::kPlanned, "KvResource::commit");
  for (const StepEntry& entry : impl_->step) {
    entry.stream->length += entry.span;
    impl_->index_full_pages(*entry.stream);
  }
  impl_->end_step();
  impl_->after_change();
}

void KvResource::abandon() {
  if (impl_->phase == Impl::Phase::kIdle) {
    impl_->require_phase(Impl::Phase::kAdmitted, "KvResource::abandon");
  }
  for (const StepEntry& entry : impl_->step) {
    StreamState& state = *entry.stream;
    const auto num_kept = static_cast<size_t>(pages_of(state.length, impl_->page_size));
    impl_->pages.drop_backwards(std::span(state.pages).subspan(num_kept));
    state.pages.resize(num_kept);
    if (state.copy_page != kNoPage) impl_->pages.drop(std::exchange(state.copy_page, kNoPage));
  }
  impl_->end_step();
  impl_->after_change();
}

void KvResource::trim(const KvStream& stream, int64_t num_tokens) {
  constexpr const char* kWhere = "KvResource::trim";
  StreamState& state = impl_->get_idle(stream, kWhere);
  if (num_tokens < 0 || num_tokens > state.length) {
    throw_invalid({"num_tokens", kWhere,
                   "0 to " + std::to_string(state.length) + ", the tokens stored",
                   std::to_string(num_tokens)});
  }
  if (num_tokens == 0) return;
  state.length -= num_tokens;
  const auto num_kept = static_cast<size_t>(pages_of(state.length, impl_->page_size));
  const auto num_full = state.length / impl_->page_size;
  impl_->pages.drop_backwards(std::span(state.pages).subspan(num_kept));
  state.pages.resize(num_kept);
  state.page_keys.resize(std::min(static_cast<size_t>(num_full), state.page_keys.size()));
  state.num_indexed = std::min(state.num_indexed, num_full);
  impl_->after_change();
}

void KvResource::remove(RequestId request) {
  constexpr const char* kWhere = "KvResource::remove";
  bool found = false;
  for (int32_t label = 0; label < impl_->streams.num_labels(); ++label) {
    const StreamState* state = impl_->streams.find(request, label);
    if (state == nullptr) continue;
    found = true;
    impl_->require_outside_step(*state, kWhere);
  }
  if (!found) {
    throw_invalid({"request", kWhere, "a request with an open stream", std::to_string(request)});
  }
  for (int32_t label = 0; label < impl_->streams.num_labels(); ++label) {
    const StreamState* state = impl_->streams.find(request, label);
    if (state == nullptr) continue;
    impl_->pages.drop_backwards(state->pages);
    impl_->streams.erase(*state);
  }
  impl_->after_change();
}

void KvResource::drop_prefixes() {
  impl_->pages.forget_all();
  impl_->streams.for_each([](StreamState& stream) { stream.num_indexed = 0; });
  impl_->after_change();
}

bool KvResource::contains(const KvStream& stream) const {
  return impl_->streams.find(stream.request, stream.label) != nullptr;
}

int64_t KvResource::length(const KvStream& stream) const {
  return impl_->get(stream, "KvResource::length").length;
}

std::span<const int32_t> KvResource::pages(const KvStream& stream) const {
  return impl_->get(stream, "KvResource::pages").pages;
}

const LatentPool& KvResource::pool() const noexcept { return impl_->pool; }
int64_t KvResource::num_pages() const noexcept { return impl_->pages.num_pages(); }
int64_t KvResource::free_pages() const noexcept { return impl_->pages.num_free(); }
int64_t KvResource::cached_pages() const noexcept { return impl_->pages.num_cached(); }

PageCounts KvResource::check() const { return impl_->check(); }

}  // namespace mla
