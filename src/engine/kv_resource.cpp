#include "mla/kv_resource.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/kv_state.hpp"
#include "mla/error.hpp"

namespace mla {

using cache::kNoPage;
using engine::quoted;
using engine::StepEntry;
using engine::StreamState;

struct KvResource::Impl : engine::KvState {
  using KvState::KvState;
};

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
  impl_->add_page_keys(state, page_keys);
  impl_->attach_prefix(state, num_tokens);
  impl_->after_change();
  return state.length;
}

void KvResource::add_page_keys(const KvStream& stream, std::span<const PageKey> page_keys) {
  impl_->add_page_keys(impl_->get(stream, "KvResource::add_page_keys"), page_keys);
}

void KvResource::fork(const KvStream& source, const KvStream& target) {
  constexpr const char* kWhere = "KvResource::fork";
  const StreamState& from = impl_->get_outside_step(source, kWhere);
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
    impl_->drop_past_length(state);
    if (state.copy_page != kNoPage) impl_->pages.drop(std::exchange(state.copy_page, kNoPage));
  }
  impl_->end_step();
  impl_->after_change();
}

void KvResource::trim(const KvStream& stream, int64_t num_tokens) {
  constexpr const char* kWhere = "KvResource::trim";
  StreamState& state = impl_->get_outside_step(stream, kWhere);
  if (num_tokens < 0 || num_tokens > state.length) {
    throw_invalid({"num_tokens", kWhere,
                   "0 to " + std::to_string(state.length) + ", the tokens stored",
                   std::to_string(num_tokens)});
  }
  if (num_tokens == 0) return;
  state.length -= num_tokens;
  impl_->drop_past_length(state);
  const int64_t num_full = state.length / impl_->page_size;
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
