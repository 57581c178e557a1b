#include "mla/kv_resource.hpp"

#include <array>
#include <iterator>
#include <string>
#include <utility>

#include "device/runtime.hpp"
#include "engine/kv_state.hpp"
#include "engine/lease.hpp"
#include "engine/text.hpp"
#include "mla/error.hpp"

namespace mla {

using engine::quoted;
using engine::StepEntry;
using engine::StepFork;
using engine::StreamState;

struct KvResource::Impl : engine::KvState {
  Impl(LatentPool& lent_pool, const KvOptions& options)
      : KvState(lent_pool, options), key(options.key) {}

  void lay_out(const engine::StepData& data, const SlotLease& lease, Stream stream,
               engine::PlannedStep& out);
  const KvPlan& plan_current(const SlotLease& lease, Stream stream);
  const KvPlan& plan_early(const KvStep& wanted, const SlotLease& lease, Stream stream);
  size_t find_plan(std::string_view label, const char* where) const;
  TensorView<const int64_t, 1> staged_slots(size_t plan, int64_t count, Stream reader);

  std::string key;
};

void KvResource::Impl::lay_out(const engine::StepData& data, const SlotLease& lease, Stream stream,
                               engine::PlannedStep& out) {
  engine::check_lease(lease, largest, "KvResource::plan");
  const int64_t num_slots = lease.bucket ? lease.bucket->shape.num_tokens : 0;
  out.layout.build(data, streams, page_size, num_slots);
  for (const LabelPlan& plan : out.layout.plans()) {
    if (!lease.bucket || plan.num_new_rows() <= num_slots) continue;
    throw_invalid({"new rows of label " + quoted(plan.label), "KvResource::plan",
                   "at most " + std::to_string(num_slots) + ", the bucket's tokens",
                   std::to_string(plan.num_new_rows())});
  }
  slot_buffers.stage(lease, out.layout.plans(), stream, out.device_slots);
  out.plan.labels = out.layout.plans();
  out.plan.page_size = page_size;
  out.plan.id = ++last_plan_id;
  out.lease = lease;
}

const KvPlan& KvResource::Impl::plan_current(const SlotLease& lease, Stream stream) {
  if (early_planned && early_plan.lease == lease) {
    std::swap(current, early_plan);
  } else {
    lay_out(step, lease, stream, current);
  }
  early_planned = false;
  copy_tails(stream);
  for (const StepFork& fork : step.forks_before) fork.target->pending = false;
  phase = Phase::kPlanned;
  after_change();
  return current.plan;
}

const KvPlan& KvResource::Impl::plan_early(const KvStep& wanted, const SlotLease& lease,
                                           Stream stream) {
  constexpr const char* kWhere = "KvResource::plan, early";
  if (!has_early) throw_state({"step", kWhere, "a pre-admitted step", "none"});
  if (early_planned) throw_state({"step", kWhere, "no plan of it yet", "a second pre-plan"});
  require_same(wanted, early, kWhere);
  if (lease.bucket && phase == Phase::kPlanned && current.lease == lease) {
    throw_invalid({"lease", kWhere, "another slot or bucket than that of the plan in use",
                   "slot " + std::to_string(lease.slot)});
  }
  lay_out(early, lease, stream, early_plan);
  early_planned = true;
  return early_plan.plan;
}

size_t KvResource::Impl::find_plan(std::string_view label, const char* where) const {
  require_phase(Phase::kPlanned, where);
  const auto plans = current.layout.plans();
  for (size_t i = 0; i < plans.size(); ++i) {
    if (plans[i].label == label) return i;
  }
  throw_invalid({"label", where, "a label that the current step plans", quoted(label)});
}

// The first `count` slots of a plan on the device, ready for what `reader` gets from here on.
TensorView<const int64_t, 1> KvResource::Impl::staged_slots(size_t plan, int64_t count,
                                                            Stream reader) {
  device::StagedBuffer& staged = *current.device_slots[plan];
  staged.order_readers(reader);
  return contiguous_view(reinterpret_cast<const int64_t*>(staged.device_data()), std::array{count},
                         pool.config().device);
}

KvResource::KvResource(LatentPool& pool, const KvOptions& options)
    : impl_(std::make_unique<Impl>(pool, options)) {}
KvResource::~KvResource() = default;
KvResource::KvResource(KvResource&&) noexcept = default;
KvResource& KvResource::operator=(KvResource&&) noexcept = default;

const std::string& KvResource::key() const noexcept { return impl_->key; }

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
  if (from.in_early) impl_->drop_early();
  impl_->copy_content(from, impl_->streams.insert(target.request, target.label));
  impl_->after_change();
}

AdmitResult KvResource::admit(const KvStep& step) {
  constexpr const char* kWhere = "KvResource::admit";
  Impl& impl = *impl_;
  if (impl.phase == Impl::Phase::kAdmitted && is_same_step(step, impl.step, impl.streams))
    return {};
  impl.require_phase(Impl::Phase::kIdle, kWhere);
  if (!impl.has_early || !is_same_step(step, impl.early, impl.streams)) {
    AdmitResult result = impl.take(step, kWhere);
    if (!result) return result;
  }
  impl.adopt_early();
  impl.after_change();
  return {};
}

AdmitResult KvResource::admit(std::span<const Segment> segments) {
  impl_->plain_step.segments.assign(segments.begin(), segments.end());
  return admit(impl_->plain_step);
}

AdmitResult KvResource::admit(const Step& step) { return admit(step.get<KvStep>(key())); }

AdmitResult KvResource::pre_admit(const KvStep& step) {
  constexpr const char* kWhere = "KvResource::pre_admit";
  Impl& impl = *impl_;
  if (impl.phase == Impl::Phase::kAdmitted) impl.require_phase(Impl::Phase::kPlanned, kWhere);
  if (impl.has_early) {
    if (is_same_step(step, impl.early, impl.streams)) return {};
    throw_state({"step", kWhere, "none that is pre-admitted already", "another one that is"});
  }
  AdmitResult result = impl.take(step, kWhere);
  if (!result) return result;
  impl.keep_early();
  impl.after_change();
  return result;
}

AdmitResult KvResource::pre_admit(const Step& step) { return pre_admit(step.get<KvStep>(key())); }

void KvResource::clear_preplan() {
  impl_->drop_early();
  impl_->early_planned = false;
  impl_->after_change();
}

std::span<const LabelPlan> KvResource::plan(Stream stream) {
  impl_->require_phase(Impl::Phase::kAdmitted, "KvResource::plan");
  return impl_->plan_current({}, stream).labels;
}

const KvPlan& KvResource::plan(const Step& step, const PlanContext& context) {
  const auto& wanted = step.get<KvStep>(key());
  if (context.is_preplan) return impl_->plan_early(wanted, context.lease, context.stream);
  constexpr const char* kWhere = "KvResource::plan";
  impl_->require_phase(Impl::Phase::kAdmitted, kWhere);
  impl_->require_same(wanted, impl_->step, kWhere);
  return impl_->plan_current(context.lease, context.stream);
}

const LabelPlan& KvResource::label_plan(std::string_view label) const {
  return impl_->current.layout.plans()[impl_->find_plan(label, "KvResource::label_plan")];
}

void KvResource::write(int32_t layer, std::string_view label, const ConstTensor<2>& ckv,
                       const ConstTensor<2>& kpe, Stream stream) {
  const size_t i = impl_->find_plan(label, "KvResource::write");
  const LabelPlan& plan = impl_->current.layout.plans()[i];
  const bool is_staged = !impl_->current.device_slots.empty();
  // In a capture the rows are the bucket's: later plans that are replayed may have more than this.
  const bool is_padded =
      ckv.shape[0] != plan.num_new_rows() ||
      (is_staged && device::runtime_of(impl_->pool.config().device).is_capturing(stream));
  const auto slots = is_padded ? plan.slots : plan.slots.first(plan.num_new_rows());
  if (!is_staged) return impl_->pool.append(layer, slots, ckv, kpe, stream);
  impl_->pool.append_at(layer, impl_->staged_slots(i, std::ssize(slots), stream), ckv, kpe, stream);
}

TensorView<const int64_t, 1> KvResource::slots_buf(std::string_view label, Stream stream) {
  constexpr const char* kWhere = "KvResource::slots_buf";
  const size_t i = impl_->find_plan(label, kWhere);
  const std::span<const int64_t> slots = impl_->current.layout.plans()[i].slots;
  if (!impl_->current.device_slots.empty()) {
    return impl_->staged_slots(i, std::ssize(slots), stream);
  }
  const Device device = impl_->pool.config().device;
  if (!device::runtime_of(device).is_immediate()) {
    throw_state({"plan", kWhere, "one under a bucket, whose slots are on " + to_string(device),
                 "one without"});
  }
  return contiguous_view(slots.data(), std::array{std::ssize(slots)}, device);
}

void KvResource::order_replay(Stream stream) {
  for (device::StagedBuffer* staged : impl_->current.device_slots) staged->order_readers(stream);
}

void KvResource::check_lease(const SlotLease& lease) const {
  engine::check_lease(lease, impl_->largest, "KvResource::plan");
}

void KvResource::size_graph_buffers(const GraphShape& largest) {
  engine::check_graph_shape(largest, Impl::kLimits, "KvResource::size_graph_buffers");
  impl_->largest = largest;
}

void KvResource::commit() {
  Impl& impl = *impl_;
  impl.require_phase(Impl::Phase::kPlanned, "KvResource::commit");
  for (const StepEntry& entry : impl.step.entries) {
    StreamState& stream = *entry.stream;
    stream.length += entry.span;
    const bool moved = impl.index_full_pages(stream);
    if (moved && stream.in_early) impl.early_planned = false;  // its pages are listed there
  }
  for (const StepFork& fork : impl.step.forks_after) impl.copy_content(*fork.source, *fork.target);
  impl.end_step();
  impl.after_change();
}

void KvResource::abandon() {
  if (impl_->phase == Impl::Phase::kIdle) {
    impl_->require_phase(Impl::Phase::kAdmitted, "KvResource::abandon");
  }
  impl_->drop_early();
  impl_->give_back();
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
  if (state.in_early) impl_->drop_early();
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
  bool in_early = false;
  for (int32_t label = 0; label < impl_->streams.num_labels(); ++label) {
    const StreamState* state = impl_->streams.find(request, label);
    if (state == nullptr) continue;
    impl_->require_outside_step(*state, kWhere);
    found = found || !state->pending;
    in_early = in_early || state->in_early;
  }
  if (!found) {
    throw_invalid({"request", kWhere, "a request with an open stream", std::to_string(request)});
  }
  if (in_early) impl_->drop_early();
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
  const StreamState* state = impl_->streams.find(stream.request, stream.label);
  return state != nullptr && !state->pending;
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
