#include "mla/attention.hpp"

#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "core/attention_impl.hpp"
#include "core/checks.hpp"
#include "core/plan_image.hpp"
#include "core/scratch_layout.hpp"
#include "cpu/driver.hpp"
#include "device/staging.hpp"
#include "mla/error.hpp"
#include "mla/supports.hpp"
#include "plan/schedule.hpp"

namespace mla {
namespace {

constexpr const char* kCreate = "PagedAttention";

// What a config comes to once it is checked.
struct Choice {
  const AttentionImpl* impl = nullptr;
  plan::CostModel cost_model;
  int32_t num_workers = 0;
  std::shared_ptr<Executor> executor{};  // where the kernel runs on the host
};

Choice choose(const AttentionConfig& config) {
  check_config(config);
  const KernelQuery query{config.geometry, strides_of(config), config.device};
  const AttentionImpl* impl = find_impl(query, config.kernel);
  if (impl == nullptr) {
    throw_invalid(
        {.what = config.kernel.empty() ? "geometry" : "kernel",
         .where = kCreate,
         .expected = "what a kernel of the device serves",
         .got = supports(query.geometry, query.device, query.strides, config.kernel).reason});
  }
  Choice choice{.impl = impl, .cost_model = impl->cost_model(query)};
  if (impl->num_workers != nullptr) {
    choice.num_workers = impl->num_workers(query);
  } else {
    choice.executor = config.executor ? config.executor : Executor::shared();
    choice.num_workers = choice.executor->num_threads();
  }
  return choice;
}

// Places in the scratch.
struct Scratch {
  bool may_split = false;
  size_t worker_memory = 0, worker_stride = 0;
  size_t partial_out = 0, partial_lse = 0;
  size_t bytes = 0;
};

Scratch lay_out(const AttentionConfig& config, const Choice& choice) {
  const auto partial_rows = static_cast<size_t>(plan::max_partial_rows(
      limits_of(config), config.geometry, choice.num_workers, config.splits, choice.cost_model));
  ScratchLayout worker;
  if (choice.impl->worker_bytes != nullptr) {
    worker.book<std::byte>(choice.impl->worker_bytes(config.geometry));
  }
  ScratchLayout layout;
  Scratch scratch{.may_split = partial_rows > 0, .worker_stride = worker.bytes()};
  scratch.worker_memory =
      layout.book<std::byte>(scratch.worker_stride * static_cast<size_t>(choice.num_workers));
  scratch.partial_out =
      layout.book<float>(partial_rows * static_cast<size_t>(config.geometry.kv_lora_rank));
  scratch.partial_lse = layout.book<float>(partial_rows);
  scratch.bytes = layout.bytes();
  return scratch;
}

struct ReleaseMemory {
  device::Runtime* runtime;
  void operator()(std::byte* memory) const { runtime->release(memory); }
};
using DeviceBytes = std::unique_ptr<std::byte, ReleaseMemory>;

// What `make` makes of memory that the limits ask for; `what` it is is said where there is none.
template <class Make>
auto allocate(size_t bytes, const std::string& what, const Make& make) {
  try {
    return make();
  } catch (const std::bad_alloc&) {
    throw_invalid({.what = "limits and splits",
                   .where = kCreate,
                   .expected = "values whose " + what + " fits in memory",
                   .got = std::to_string(bytes) + " bytes of " + what});
  }
}

}  // namespace

struct PagedAttention::Impl {
  AttentionConfig config;
  Choice choice;
  std::string kernel;
  device::Runtime& runtime;
  PlanImage image;
  device::StagedBuffer staged;  // the current plan
  Scratch scratch;
  DeviceBytes owned_scratch{nullptr, ReleaseMemory{nullptr}};
  std::byte* scratch_memory = nullptr;

  // What the host keeps of the current plan.
  std::optional<PlanInfo> info;
  // The next plan, until all of it is in order. Under a lease it has one request more than the
  // bucket has rows: it owns the tokens that no request has, and sees no key.
  std::vector<int32_t> qo_indptr, kv_indptr, kv_len;
  plan::Schedule schedule;

  explicit Impl(const AttentionConfig& wanted)
      : config(wanted),
        choice(choose(wanted)),
        kernel(choice.impl->name),
        runtime(device::runtime_of(wanted.device)),
        image(limits_of(wanted), wanted.geometry, choice.num_workers, wanted.splits,
              choice.cost_model),
        staged(allocate(image.max_bytes(), "plan",
                        [this] { return device::StagedBuffer(runtime, image.max_bytes()); })),
        scratch(lay_out(config, choice)) {
    if (config.scratch.empty()) {
      owned_scratch = allocate(scratch.bytes, "scratch", [this] {
        return DeviceBytes(static_cast<std::byte*>(runtime.allocate(scratch.bytes)),
                           ReleaseMemory{&runtime});
      });
      scratch_memory = owned_scratch.get();
    } else {
      check_lent_memory(config.scratch, scratch.bytes, "scratch", kCreate);
      scratch_memory = config.scratch.data();
    }
    if (choice.impl->prepare != nullptr) {
      choice.impl->prepare({config.geometry, strides_of(config), config.device});
    }
  }

  int64_t num_rows(const CheckedBatch& checked) const {
    return config.bucket ? config.bucket->num_rows : checked.num_rows;
  }

  void pad_to_bucket(const CheckedBatch& checked, const Batch& batch) {
    qo_indptr.assign(batch.qo_indptr.begin(), batch.qo_indptr.end());
    kv_indptr.assign(batch.kv_indptr.begin(), batch.kv_indptr.end());
    if (!config.bucket) return;
    const auto rows = static_cast<size_t>(config.bucket->num_rows);
    qo_indptr.resize(rows + 1, static_cast<int32_t>(checked.num_tokens));
    qo_indptr.push_back(static_cast<int32_t>(config.bucket->num_tokens));
    kv_indptr.resize(rows + 2, static_cast<int32_t>(checked.num_listed_pages));
    kv_len.resize(rows + 1, 0);
  }

  PlanInfo describe(const CheckedBatch& checked) const {
    const size_t row_bytes =
        (static_cast<size_t>(config.geometry.kv_lora_rank) + 1) * sizeof(float);
    return {.num_rows = num_rows(checked),
            .num_tokens = checked.num_tokens,
            .num_tiles = static_cast<int64_t>(schedule.tiles.size()),
            .num_splits = schedule.max_splits,
            .partial_bytes = static_cast<size_t>(schedule.num_partial_rows) * row_bytes};
  }

  // The launch of a run whose tensors are checked.
  AttentionLaunch launch_of(const RunArgs& args, int64_t plan_rows) const {
    const int64_t tokens = args.q_nope.shape[0];
    const bool whole_bucket = config.bucket && tokens == config.bucket->num_tokens;
    return {
        .params = {.geometry = config.geometry,
                   .q_nope = args.q_nope.data,
                   .q_pe = args.q_pe.data,
                   .ckv = args.cache.ckv.data,
                   .kpe = args.cache.kpe.data,
                   .out = args.out.data,
                   .lse = args.lse.data,
                   .q_nope_token_stride = args.q_nope.stride[0],
                   .q_nope_head_stride = args.q_nope.stride[1],
                   .q_pe_token_stride = args.q_pe.stride[0],
                   .q_pe_head_stride = args.q_pe.stride[1],
                   .out_token_stride = args.out.stride[0],
                   .out_head_stride = args.out.stride[1],
                   .lse_token_stride = args.lse.stride[0],
                   .lse_head_stride = args.lse.stride[1],
                   .cache = strides_of(config),
                   .partial_out = reinterpret_cast<float*>(scratch_memory + scratch.partial_out),
                   .partial_lse = reinterpret_cast<float*>(scratch_memory + scratch.partial_lse)},
        .image = image,
        .plan = staged.device_data(),
        .device = config.device,
        .num_requests = static_cast<int32_t>(plan_rows + (whole_bucket ? 1 : 0)),
        .num_workers = choice.num_workers,
        .may_split = scratch.may_split,
        .worker_memory = scratch_memory + scratch.worker_memory,
        .worker_stride = scratch.worker_stride,
        .executor = choice.executor.get()};
  }

  TokenCounts token_counts(const PlanInfo& plan, bool in_capture) const {
    TokenCounts counts{.planned = plan.num_tokens, .in_capture = in_capture};
    if (config.bucket) counts.bucket = config.bucket->num_tokens;
    return counts;
  }

  const PlanInfo& current(const char* where) const {
    if (!info) {
      throw_state({.what = "plan", .where = where, .expected = "a plan before it", .got = "none"});
    }
    return *info;
  }

  TensorView<const int32_t, 1> index_view(size_t at, int64_t size) const {
    return contiguous_view(reinterpret_cast<const int32_t*>(staged.device_data() + at),
                           std::array<int64_t, 1>{size}, config.device);
  }
};

PagedAttention::PagedAttention(const AttentionConfig& config)
    : impl_(std::make_unique<Impl>(config)) {}
PagedAttention::~PagedAttention() = default;
PagedAttention::PagedAttention(PagedAttention&&) noexcept = default;
PagedAttention& PagedAttention::operator=(PagedAttention&&) noexcept = default;

size_t PagedAttention::scratch_bytes(const AttentionConfig& config) {
  return lay_out(config, choose(config)).bytes;
}

void PagedAttention::plan(const Batch& batch, const PlanOptions& options, Stream stream) {
  Impl& impl = *impl_;
  check_options(options);
  const CheckedBatch checked = check_batch(batch, impl.config, impl.kv_len);
  impl.pad_to_bucket(checked, batch);
  plan::make_schedule({.qo_indptr = impl.qo_indptr,
                       .kv_len = impl.kv_len,
                       .num_heads = impl.config.geometry.num_heads,
                       .causal = options.causal,
                       .num_workers = impl.choice.num_workers,
                       .splits = impl.config.splits},
                      impl.choice.cost_model, impl.schedule);
  std::byte* const staging = impl.staged.begin_write(stream);
  // Nothing can be refused from here on.
  const auto num_listed = static_cast<size_t>(checked.num_listed_pages);
  const size_t bytes = impl.image.write({.qo_indptr = impl.qo_indptr,
                                         .kv_indptr = impl.kv_indptr,
                                         .kv_indices = batch.kv_indices.first(num_listed),
                                         .kv_len = impl.kv_len,
                                         .schedule = &impl.schedule,
                                         .options = options},
                                        staging);
  impl.staged.end_write(bytes, stream);
  impl.info = impl.describe(checked);
}

void PagedAttention::run(const RunArgs& args, Stream stream) {
  Impl& impl = *impl_;
  const PlanInfo& info = impl.current("PagedAttention::run");
  const bool in_capture = impl.runtime.is_capturing(stream);
  if (in_capture && !impl.config.capture) {
    throw_state({.what = "stream",
                 .where = "PagedAttention::run",
                 .expected = "no capture, since the object was created without `capture`",
                 .got = "a stream in a capture"});
  }
  check_run(args, impl.config, impl.token_counts(info, in_capture));
  if (args.q_nope.shape[0] == 0) return;
  const AttentionImpl& kernel = *impl.choice.impl;
  const AttentionLaunch launch = impl.launch_of(args, info.num_rows);
  if (impl.runtime.is_immediate()) return cpu::run_schedule(kernel, launch);
  impl.staged.order_readers(stream);
  if (kernel.launch != nullptr) return kernel.launch(launch, stream);
  impl.runtime.submit(stream, "attention",
                      [&kernel, launch] { cpu::run_schedule(kernel, launch); });
}

void PagedAttention::order_replay(Stream stream) { impl_->staged.order_readers(stream); }

const std::string& PagedAttention::kernel() const noexcept { return impl_->kernel; }

PlanInfo PagedAttention::info() const { return impl_->current("PagedAttention::info"); }

TensorView<const int32_t, 1> PagedAttention::qo_indptr_buf() const {
  const PlanInfo& info = impl_->current("PagedAttention::qo_indptr_buf");
  return impl_->index_view(impl_->image.qo_indptr_at(), info.num_rows + 1);
}

TensorView<const int32_t, 1> PagedAttention::kv_len_buf() const {
  const PlanInfo& info = impl_->current("PagedAttention::kv_len_buf");
  return impl_->index_view(impl_->image.kv_len_at(), info.num_rows);
}

}  // namespace mla
