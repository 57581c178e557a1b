#include "engine/kv_state.hpp"

#include <algorithm>

#include "device/runtime.hpp"
#include "engine/text.hpp"
#include "mla/error.hpp"

namespace mla::engine {

using cache::kNoPage;

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
      claim(lent_pool, "KvResource"),
      page_size(lent_pool.config().page_size),
      checks_itself(options.check_every_call.value_or(built_with_assertions())),
      pages(static_cast<int32_t>(lent_pool.config().num_pages)),
      slot_buffers(device::runtime_of(lent_pool.config().device)),
      leaving(lent_pool.config().num_pages, 0) {}

const StreamState& KvState::get(const KvStream& name, const char* where) const {
  const StreamState* stream = streams.find(name.request, name.label);
  if (stream == nullptr || stream->pending) {
    throw_invalid({"stream", where, "an open stream", name_of_stream(name.request, name.label)});
  }
  return *stream;
}

StreamState& KvState::get_outside_step(const KvStream& name, const char* where) {
  StreamState& stream = get(name, where);
  require_outside_step(stream, where);
  return stream;
}

void KvState::require_absent(const KvStream& name, const std::string& what,
                             const char* where) const {
  const StreamState* stream = streams.find(name.request, name.label);
  if (stream == nullptr) return;
  throw_invalid({what, where, "a stream that is not open",
                 name_of_stream(name.request, name.label) +
                     (stream->pending ? ", which an admitted step makes" : ", which is")});
}

void KvState::require_phase(Phase wanted, const char* where) const {
  if (phase == wanted) return;
  constexpr const char* kNames[] = {"no step", "an admitted step", "a planned step"};
  throw_state({"step", where, kNames[static_cast<int>(wanted)], kNames[static_cast<int>(phase)]});
}

void KvState::require_same(const KvStep& wanted, const StepData& admitted,
                           const char* where) const {
  if (is_same_step(wanted, admitted, streams)) return;
  throw_invalid({"step", where, "the step that was admitted", "another one"});
}

void KvState::require_outside_step(const StreamState& stream, const char* where) const {
  if (!stream.in_step) return;
  throw_state({"stream", where, "a stream outside the current step (commit or abandon it first)",
               name_of_stream(stream.request, streams.label_name(stream.label))});
}

void KvState::copy_tails(Stream device_stream) {
  copies.clear();
  for (const StepEntry& entry : step.entries) {
    if (entry.copy_page == kNoPage) continue;
    copies.push_back({.from = entry.stream->pages[entry.start / page_size], .to = entry.copy_page});
  }
  pool.copy_pages(copies, device_stream);
  for (StepEntry& entry : step.entries) {
    if (entry.copy_page == kNoPage) continue;
    pages.drop(std::exchange(entry.stream->pages[entry.start / page_size],
                             std::exchange(entry.copy_page, kNoPage)));
  }
}

// Where the index knows the key, its page takes the place of the stream's own. Not where others
// hold that one too: the pages behind it may be theirs as well, and whoever holds an indexed page
// must hold the one before it. Stops there, at a page that the index has under another key, and at
// a key that collides: what follows could not be found behind it.
bool KvState::index_full_pages(StreamState& stream) {
  bool moved = false;
  const int64_t num_full =
      std::min(stream.length / page_size, static_cast<int64_t>(stream.page_keys.size()));
  for (int64_t& i = stream.num_indexed; i < num_full; ++i) {
    const int32_t own = stream.pages[i];
    const int32_t parent = i == 0 ? kNoPage : stream.pages[i - 1];
    const int32_t known = pages.find(stream.page_keys[i], parent);
    if (known == own) continue;
    if (known == kNoPage) {
      if (pages.is_indexed(own) || !pages.enter(stream.page_keys[i], parent, own)) break;
    } else {
      if (pages.refs(own) > 1) break;
      pages.hold(known);
      pages.drop(own);
      stream.pages[i] = known;
      moved = true;
    }
  }
  return moved;
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

void KvState::copy_content(const StreamState& from, StreamState& to) {
  to.length = from.length;
  to.pages = from.pages;
  for (const int32_t page : to.pages) pages.hold(page);
  if (to.label != from.label) return;
  // The keys of full pages: what follows may differ.
  const int64_t num_keys =
      std::min(from.length / page_size, static_cast<int64_t>(from.page_keys.size()));
  to.page_keys.assign(from.page_keys.begin(), from.page_keys.begin() + num_keys);
  to.num_indexed = from.num_indexed;
}

}  // namespace mla::engine
