#include "mla/attention_resource.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/checks.hpp"
#include "device/runtime.hpp"
#include "engine/attention_rows.hpp"
#include "engine/lease.hpp"
#include "engine/select_rows.hpp"
#include "engine/text.hpp"
#include "mla/error.hpp"
#include "mla/kv_step.hpp"
#include "mla/supports.hpp"

namespace mla {
namespace {

constexpr const char* kCreate = "AttentionResource";
constexpr const char* kPlan = "AttentionResource::plan";

void check_options(const LatentPool& pool, const AttentionOptions& options) {
  const auto refuse = [](const char* what, std::string expected, std::string got) {
    throw_invalid(
        {.what = what, .where = kCreate, .expected = std::move(expected), .got = std::move(got)});
  };
  if (!(std::isfinite(options.sm_scale) && options.sm_scale > 0)) {
    refuse("options.sm_scale",
           "a finite value above 0, the scale of the model's original head width"
           " (it has no default)",
           std::isnan(options.sm_scale) ? "none, or NaN" : std::to_string(options.sm_scale));
  }
  check_lse_base(options.lse_base, "options.lse_base", kCreate);
  if (options.geometry.num_heads == 0) {
    refuse("options.geometry.num_heads", "the query heads of this rank (it has no default)", "0");
  }
  const Geometry pools = AttentionResource::geometry_of(pool, options.geometry.num_heads);
  const auto match = [&](const char* what, int64_t wanted, int64_t has) {
    if (wanted != has) refuse(what, std::to_string(has) + ", the pool's", std::to_string(wanted));
  };
  match("options.geometry.kv_lora_rank", options.geometry.kv_lora_rank, pools.kv_lora_rank);
  match("options.geometry.qk_rope_head_dim", options.geometry.qk_rope_head_dim,
        pools.qk_rope_head_dim);
  match("options.geometry.page_size", options.geometry.page_size, pools.page_size);
  if (options.geometry.kv_dtype != pools.kv_dtype) {
    refuse("options.geometry.kv_dtype", std::string(name_of(pools.kv_dtype)) + ", the pool's",
           std::string(name_of(options.geometry.kv_dtype)));
  }
}

// What plan objects have in common: no bucket yet, no scratch of its own lent.
AttentionConfig common_config(const LatentPool& pool, const AttentionOptions& options) {
  check_options(pool, options);
  return {.geometry = options.geometry,
          .num_pages = pool.total_pages(),
          .device = pool.config().device,
          .strides = std::nullopt,
          .limits = options.limits,
          .bucket = std::nullopt,
          .capture = false,
          .splits = options.splits,
          .kernel = options.kernel,
          .executor = options.executor,
          .scratch = options.scratch};
}

GraphShape shape_of(const Limits& limits) {
  return {.num_rows = limits.max_rows,
          .num_tokens = limits.max_tokens,
          .num_listed_pages = limits.max_listed_pages};
}

// The exact scratch of the largest plan, eager or captured. Refuses what a plan object would
// refuse.
size_t scratch_of(AttentionConfig config, bool capture) {
  const size_t eager = PagedAttention::scratch_bytes(config);
  if (!capture) return eager;
  config.capture = true;
  config.bucket =
      Bucket{.num_rows = config.limits.max_rows, .num_tokens = config.limits.max_tokens};
  return std::max(eager, PagedAttention::scratch_bytes(config));
}

// A plan object, kept for the resource's life.
struct PlanObject {
  std::string label;
  int32_t pass;
  PagedAttention attention;
};

// All plan objects of one slot and, under a bucket, of its captured graph.
struct PlanSet {
  SlotLease lease;
  std::vector<std::unique_ptr<PlanObject>> objects;

  PlanObject* find(std::string_view label, int32_t pass) const {
    for (const auto& object : objects) {
      if (object->pass == pass && object->label == label) return object.get();
    }
    return nullptr;
  }
};

bool same_passes(std::span<const AttentionPass> a, std::span<const AttentionPass> b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(), [](const AttentionPass& x, const AttentionPass& y) {
        return x.causal == y.causal && x.context_only == y.context_only && x.segments == y.segments;
      });
}

// A step planned into a set.
struct Planned {
  AttentionPlan plan;
  const PlanSet* set = nullptr;  // null: nothing is planned
};

// A batch without requests.
constexpr int32_t kZero[] = {0};
constexpr Batch kNoRows = {
    .qo_indptr = kZero, .kv_indptr = kZero, .kv_indices = {}, .kv_len = {}, .kv_last_page_len = {}};

}  // namespace

struct AttentionResource::Impl {
  const LatentPool& pool;
  std::string kv_key;
  AttentionOptions options;
  AttentionConfig config;
  std::string kernel;
  GraphShape largest;  // of a bucket

  std::vector<std::unique_ptr<PlanSet>> sets;
  Planned current, early;
  Planned spare;  // the next current one while it is made
  // Of the early plan: copies of what it was made for. Their labels are the plan objects' own.
  std::vector<AttentionPass> early_passes;
  std::vector<std::string> early_labels;
  uint64_t last_plan_id = 0;
  bool newer_declared = false;  // a step was admitted after the current plan
  engine::StepRows rows;        // of the plan being made

  std::string cursor_label = "main";
  int32_t cursor_layer = 0;

  Impl(const LatentPool& lent, std::string kv, const AttentionOptions& wanted)
      : pool(lent), kv_key(std::move(kv)), options(wanted), config(common_config(lent, wanted)) {
    const size_t bytes = scratch_of(config, options.capture);
    if (!options.scratch.empty()) {
      check_lent_memory(options.scratch, bytes, "options.scratch", kCreate);
    }
    kernel = supports(config.geometry, config.device, std::nullopt, config.kernel).kernel;
    largest = shape_of(config.limits);
  }

  PlanSet& set_of(const SlotLease& lease) {
    for (const auto& set : sets) {
      if (set->lease == lease) return *set;
    }
    engine::check_lease(lease, largest, kPlan);
    sets.push_back(std::make_unique<PlanSet>(PlanSet{.lease = lease, .objects = {}}));
    return *sets.back();
  }

  PlanObject& object_of(PlanSet& set, std::string_view label, int32_t pass) {
    if (PlanObject* found = set.find(label, pass); found != nullptr) return *found;
    AttentionConfig wanted = config;
    if (set.lease.bucket) {
      wanted.bucket = set.lease.bucket->shape;
      wanted.limits.max_listed_pages = largest.num_listed_pages;
      wanted.capture = options.capture;
    }
    set.objects.push_back(std::make_unique<PlanObject>(PlanObject{
        .label = std::string(label), .pass = pass, .attention = PagedAttention(wanted)}));
    return *set.objects.back();
  }

  // The limits that a plan object would refuse, before any object is planned anew.
  void check_sizes(const SlotLease& lease) const {
    const bool leased = lease.bucket.has_value();
    const GraphShape most =
        leased ? GraphShape{lease.bucket->shape.num_rows, lease.bucket->shape.num_tokens,
                            largest.num_listed_pages}
               : shape_of(config.limits);
    for (const engine::PassRows& row : rows.rows()) {
      const auto within = [&](const char* what, int64_t value, int64_t limit) {
        if (value <= limit) return;
        throw_invalid({.what = std::string(what) + " of label " + engine::quoted(row.label) +
                               ", pass " + std::to_string(row.pass),
                       .where = kPlan,
                       .expected = "at most " + std::to_string(limit) +
                                   (leased ? ", the bucket's" : ", the limit"),
                       .got = std::to_string(value)});
      };
      within("rows", static_cast<int64_t>(row.batch.qo_indptr.size()) - 1, most.num_rows);
      within("query tokens", row.batch.qo_indptr.back(), most.num_tokens);
      within("listed pages", row.batch.kv_indptr.back(), most.num_listed_pages);
    }
  }

  // Plans the laid-out rows into the set. Under a bucket its other objects are planned without
  // rows, since the bucket's graph replays them all.
  void plan_into(PlanSet& set, Planned& planned, uint64_t kv_plan_id, Stream stream) {
    planned.plan.entries.clear();
    planned.plan.id = ++last_plan_id;
    planned.plan.kv_plan_id = kv_plan_id;
    PlanOptions how{.sm_scale = options.sm_scale, .causal = true, .lse_base = options.lse_base};
    for (const engine::PassRows& row : rows.rows()) {
      PlanObject& object = object_of(set, row.label, row.pass);
      how.causal = row.causal;
      object.attention.plan(row.batch, how, stream);
      planned.plan.entries.push_back({object.label, object.pass, &object.attention});
    }
    if (set.lease.bucket && planned.plan.entries.size() < set.objects.size()) {
      plan_without_rows(set, planned, stream);
    }
    planned.set = &set;
  }

  void plan_without_rows(PlanSet& set, Planned& planned, Stream stream) {
    for (const auto& object : set.objects) {
      const auto& entries = planned.plan.entries;
      const bool done = std::any_of(entries.begin(), entries.end(), [&](const auto& entry) {
        return entry.attention == &object->attention;
      });
      if (done) continue;
      object->attention.plan(
          kNoRows, {.sm_scale = options.sm_scale, .causal = true, .lse_base = options.lse_base},
          stream);
      planned.plan.entries.push_back({object->label, object->pass, &object->attention});
    }
  }

  const AttentionPlan& plan_now(const AttentionStep& wanted, const KvPlan& kv,
                                const PlanContext& context) {
    rows.lay_out(kv, wanted.passes, config.geometry.page_size);
    PlanSet& set = set_of(context.lease);
    check_sizes(context.lease);
    if (current.set == &set) current.set = nullptr;  // until all of it is planned anew
    plan_into(set, spare, kv.id, context.stream);
    std::swap(current, spare);
    spare.set = nullptr;
    return current.plan;
  }

  const AttentionPlan& plan_early(const AttentionStep& wanted, const KvPlan& kv,
                                  const PlanContext& context) {
    if (early.set != nullptr) {
      throw_state({.what = "pre-plan",
                   .where = kPlan,
                   .expected = "none before it that was neither promoted nor cleared",
                   .got = "a second one"});
    }
    rows.lay_out(kv, wanted.passes, config.geometry.page_size);
    PlanSet& set = set_of(context.lease);
    check_sizes(context.lease);
    if (current.set == &set) {
      throw_invalid({.what = "lease",
                     .where = kPlan,
                     .expected = "another slot or bucket than that of the plan in use, since this"
                                 " is a pre-plan",
                     .got = "slot " + std::to_string(context.lease.slot)});
    }
    remember(wanted.passes);
    plan_into(set, early, kv.id, context.stream);
    return early.plan;
  }

  // Labels of a step are lent for the call, so the copy gets labels of its own.
  void remember(std::span<const AttentionPass> passes) {
    early_passes.assign(passes.begin(), passes.end());
    early_labels.clear();
    for (const AttentionPass& pass : passes) {
      for (const QuerySegment& segment : pass.segments) early_labels.emplace_back(segment.label);
    }
    size_t at = 0;
    for (AttentionPass& pass : early_passes) {
      for (QuerySegment& segment : pass.segments) segment.label = early_labels[at++];
    }
  }

  bool early_is_for(const AttentionStep& wanted, const KvPlan& kv, const SlotLease& lease) const {
    return early.set != nullptr && early.plan.kv_plan_id == kv.id && early.set->lease == lease &&
           same_passes(early_passes, wanted.passes);
  }

  void require_plan(const char* where) const {
    if (current.set != nullptr) return;
    throw_state({.what = "plan", .where = where, .expected = "a plan before it", .got = "none"});
  }

  const AttentionPlan::Entry& entry(const char* where, std::string_view label, int32_t pass) const {
    require_plan(where);
    for (const AttentionPlan::Entry& entry : current.plan.entries) {
      if (entry.pass == pass && entry.label == label) return entry;
    }
    throw_invalid({.what = "label and pass",
                   .where = where,
                   .expected = "those of the current plan",
                   .got = engine::quoted(label) + ", pass " + std::to_string(pass)});
  }
};

AttentionResource::AttentionResource(const LatentPool& pool, std::string kv_key,
                                     const AttentionOptions& options)
    : impl_(std::make_unique<Impl>(pool, std::move(kv_key), options)) {}
AttentionResource::~AttentionResource() = default;

Geometry AttentionResource::geometry_of(const LatentPool& pool, int32_t num_heads) {
  const PoolConfig& config = pool.config();
  return {.num_heads = num_heads,
          .kv_lora_rank = config.kv_lora_rank,
          .qk_rope_head_dim = config.qk_rope_head_dim,
          .page_size = config.page_size,
          .dtype = config.dtype,
          .kv_dtype = config.dtype};
}

size_t AttentionResource::scratch_bytes(const LatentPool& pool, const AttentionOptions& options) {
  return scratch_of(common_config(pool, options), options.capture);
}

const std::string& AttentionResource::key() const noexcept { return impl_->options.key; }

std::vector<std::string> AttentionResource::depends_on() const { return {impl_->kv_key}; }

AdmitResult AttentionResource::admit(const Step& step) {
  (void)step.get<AttentionStep>(key());  // missing or of another kind: said before any work
  impl_->newer_declared = true;
  return {};
}

void AttentionResource::abandon() {
  Impl& impl = *impl_;
  if (impl.newer_declared) {
    impl.newer_declared = false;  // it was not planned: the plan before it holds again
  } else {
    impl.current.set = nullptr;
  }
}

const AttentionPlan& AttentionResource::plan(const Step& step, const PlanContext& context) {
  Impl& impl = *impl_;
  const auto& wanted = step.get<AttentionStep>(key());
  const auto& kv = context.results.get<KvPlan>(impl.kv_key);
  if (kv.page_size != impl.config.geometry.page_size) {
    throw_invalid({.what = "page_size of " + engine::quoted(impl.kv_key),
                   .where = "AttentionResource::plan",
                   .expected = std::to_string(impl.config.geometry.page_size) +
                               ", that of the pool this resource attends to",
                   .got = std::to_string(kv.page_size)});
  }
  if (context.is_preplan) return impl.plan_early(wanted, kv, context);
  if (impl.early_is_for(wanted, kv, context.lease)) {
    std::swap(impl.current, impl.early);
  } else {
    impl.plan_now(wanted, kv, context);
  }
  impl.early.set = nullptr;
  impl.newer_declared = false;
  impl.cursor_label = "main";
  impl.cursor_layer = 0;
  return impl.current.plan;
}

void AttentionResource::clear_preplan() { impl_->early.set = nullptr; }

void AttentionResource::order_replay(Stream stream) {
  if (impl_->current.set == nullptr) return;
  for (const AttentionPlan::Entry& entry : impl_->current.plan.entries) {
    entry.attention->order_replay(stream);
  }
}

void AttentionResource::check_lease(const SlotLease& lease) const {
  engine::check_lease(lease, impl_->largest, kPlan);
}

void AttentionResource::size_graph_buffers(const GraphShape& largest) {
  engine::check_graph_shape(largest, shape_of(impl_->config.limits),
                            "AttentionResource::size_graph_buffers");
  impl_->largest = largest;
}

void AttentionResource::set_cursor(std::string_view label, int32_t layer) {
  constexpr const char* kWhere = "AttentionResource::set_cursor";
  impl_->require_plan(kWhere);
  if (std::ranges::find(impl_->current.plan.entries, label, &AttentionPlan::Entry::label) ==
      impl_->current.plan.entries.end()) {
    throw_invalid({.what = "label",
                   .where = kWhere,
                   .expected = "one that the current plan has",
                   .got = engine::quoted(label)});
  }
  const int32_t num_layers = impl_->pool.config().num_layers;
  if (layer < 0 || layer >= num_layers) {
    throw_invalid({.what = "layer",
                   .where = kWhere,
                   .expected = "0 to " + std::to_string(num_layers - 1),
                   .got = std::to_string(layer)});
  }
  impl_->cursor_label = label;
  impl_->cursor_layer = layer;
}

void AttentionResource::run(const AttendArgs& args, Stream stream) {
  constexpr const char* kRun = "AttentionResource::run";
  Impl& impl = *impl_;
  if (impl.newer_declared) {
    throw_state({.what = "plan",
                 .where = kRun,
                 .expected = "one of the step that was admitted last",
                 .got = "an older one"});
  }
  PagedAttention& attention =
      *impl.entry(kRun, args.label.value_or(impl.cursor_label), args.pass).attention;
  attention.run(
      {.q_nope = args.q_nope,
       .q_pe = args.q_pe,
       .cache = args.cache ? *args.cache : impl.pool.views(args.layer.value_or(impl.cursor_layer)),
       .out = args.out,
       .lse = args.lse},
      stream);
}

TensorView<const int32_t, 1> AttentionResource::qo_indptr_buf(std::string_view label,
                                                              int32_t pass) const {
  return impl_->entry("AttentionResource::qo_indptr_buf", label, pass).attention->qo_indptr_buf();
}

TensorView<const int32_t, 1> AttentionResource::kv_len_buf(std::string_view label,
                                                           int32_t pass) const {
  return impl_->entry("AttentionResource::kv_len_buf", label, pass).attention->kv_len_buf();
}

void AttentionResource::select_last_hidden(const ConstTensor<2>& hidden, const Tensor<2>& out,
                                           std::string_view label, int32_t pass,
                                           Stream stream) const {
  PagedAttention& attention =
      *impl_->entry("AttentionResource::select_last_hidden", label, pass).attention;
  TokenCounts tokens{.planned = attention.info().num_tokens,
                     .in_capture = device::runtime_of(impl_->config.device).is_capturing(stream)};
  if (const auto& bucket = impl_->current.set->lease.bucket) {
    tokens.bucket = bucket->shape.num_tokens;
  } else if (tokens.in_capture) {
    throw_state({.what = "stream",
                 .where = "AttentionResource::select_last_hidden",
                 .expected = "no capture, since the plan is under no bucket",
                 .got = "a stream in a capture"});
  }
  attention.order_replay(stream);
  engine::select_last_rows(attention.qo_indptr_buf(), tokens, hidden, out, stream);
}

const std::string& AttentionResource::kernel() const noexcept { return impl_->kernel; }

bool AttentionResource::uses_kernel() const noexcept { return impl_->kernel != "reference"; }

}  // namespace mla
