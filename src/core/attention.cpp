#include "mla/attention.hpp"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "core/attention_impl.hpp"
#include "core/checks.hpp"
#include "core/scratch_layout.hpp"
#include "cpu/driver.hpp"
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
  std::shared_ptr<Executor> executor;
};

Choice choose(const AttentionConfig& config) {
  check_config(config);
  const CacheStrides strides = strides_of(config);
  const AttentionImpl* impl = find_impl(config.geometry, config.device, strides, config.kernel);
  if (impl == nullptr) {
    throw_invalid({.what = config.kernel.empty() ? "geometry" : "kernel",
                   .where = kCreate,
                   .expected = "what a kernel of the device serves",
                   .got = supports(config.geometry, config.device, strides, config.kernel).reason});
  }
  return {.impl = impl,
          .cost_model = impl->cost_model(config.geometry),
          .executor = config.executor ? config.executor : Executor::shared()};
}

// Places in the scratch.
struct Scratch {
  size_t worker_memory = 0, worker_stride = 0;
  size_t partial_out = 0, partial_lse = 0;
  size_t bytes = 0;
};

Scratch lay_out(const AttentionConfig& config, const Choice& choice) {
  const auto num_workers = choice.executor->num_threads();
  const auto partial_rows = static_cast<size_t>(plan::max_partial_rows(
      limits_of(config), config.geometry, num_workers, config.splits, choice.cost_model));
  ScratchLayout worker;
  worker.book<std::byte>(choice.impl->worker_bytes(config.geometry));
  ScratchLayout layout;
  Scratch scratch;
  scratch.worker_stride = worker.bytes();
  scratch.worker_memory =
      layout.book<std::byte>(scratch.worker_stride * static_cast<size_t>(num_workers));
  scratch.partial_out =
      layout.book<float>(partial_rows * static_cast<size_t>(config.geometry.kv_lora_rank));
  scratch.partial_lse = layout.book<float>(partial_rows);
  scratch.bytes = layout.bytes();
  return scratch;
}

struct AlignedDelete {
  void operator()(std::byte* memory) const {
    ::operator delete(memory, std::align_val_t{ScratchLayout::kAlignment});
  }
};
using AlignedBytes = std::unique_ptr<std::byte, AlignedDelete>;

AlignedBytes allocate(size_t bytes) {
  try {
    return AlignedBytes(static_cast<std::byte*>(
        ::operator new(bytes, std::align_val_t{ScratchLayout::kAlignment})));
  } catch (const std::bad_alloc&) {
    throw_invalid({.what = "limits and splits",
                   .where = kCreate,
                   .expected = "values whose scratch fits in memory",
                   .got = std::to_string(bytes) + " bytes of scratch"});
  }
}

void check_lent(std::span<std::byte> lent, size_t needed) {
  if (lent.size() < needed) {
    throw_invalid({.what = "scratch.size()",
                   .where = kCreate,
                   .expected = "at least " + std::to_string(needed) + " bytes",
                   .got = std::to_string(lent.size())});
  }
  if (reinterpret_cast<uintptr_t>(lent.data()) % ScratchLayout::kAlignment != 0) {
    throw_invalid({.what = "scratch.data()",
                   .where = kCreate,
                   .expected = "an address aligned to " +
                               std::to_string(ScratchLayout::kAlignment) + " bytes",
                   .got = "another"});
  }
}

}  // namespace

struct PagedAttention::Impl {
  AttentionConfig config;
  Choice choice;
  std::string kernel;
  Scratch scratch;
  AlignedBytes owned_scratch;
  std::byte* scratch_memory = nullptr;

  // The current plan, at addresses that stay. Sized by the limits, one row longer than them: under
  // a lease the row after the bucket's owns the tokens that no request has, and sees no key.
  std::unique_ptr<int32_t[]> qo_indptr, kv_indptr, kv_indices, kv_len;
  plan::Schedule schedule;
  PlanOptions options;
  bool planned = false;
  int64_t num_rows = 0;    // the bucket's under a lease
  int64_t num_tokens = 0;  // of the batch

  // The next plan, until all of it is in order.
  std::vector<int32_t> next_qo_indptr, next_kv_len;
  plan::Schedule next_schedule;

  explicit Impl(const AttentionConfig& wanted)
      : config(wanted),
        choice(choose(wanted)),
        kernel(choice.impl->name),
        scratch(lay_out(config, choice)) {
    if (config.scratch.empty()) {
      owned_scratch = allocate(scratch.bytes);
      scratch_memory = owned_scratch.get();
    } else {
      check_lent(config.scratch, scratch.bytes);
      scratch_memory = config.scratch.data();
    }
    const Limits limits = limits_of(config);
    const auto rows = static_cast<size_t>(limits.max_rows) + 2;
    qo_indptr = std::make_unique_for_overwrite<int32_t[]>(rows);
    kv_indptr = std::make_unique_for_overwrite<int32_t[]>(rows);
    kv_len = std::make_unique_for_overwrite<int32_t[]>(rows);
    kv_indices =
        std::make_unique_for_overwrite<int32_t[]>(static_cast<size_t>(limits.max_listed_pages));
  }

  // Offsets and key counts of the batch; under a lease with the bucket's missing rows, and behind
  // them one that owns the remaining tokens.
  void pad_to_bucket(const CheckedBatch& checked, const Batch& batch) {
    next_qo_indptr.assign(batch.qo_indptr.begin(), batch.qo_indptr.end());
    if (!config.bucket) return;
    const auto rows = static_cast<size_t>(config.bucket->num_rows);
    next_qo_indptr.resize(rows + 1, static_cast<int32_t>(checked.num_tokens));
    next_qo_indptr.push_back(static_cast<int32_t>(config.bucket->num_tokens));
    next_kv_len.resize(rows + 1, 0);
  }

  // Nothing here can fail.
  void adopt_next(const CheckedBatch& checked, const Batch& batch, const PlanOptions& wanted) {
    std::copy(next_qo_indptr.begin(), next_qo_indptr.end(), qo_indptr.get());
    std::copy(next_kv_len.begin(), next_kv_len.end(), kv_len.get());
    std::copy(batch.kv_indptr.begin(), batch.kv_indptr.end(), kv_indptr.get());
    std::fill(kv_indptr.get() + batch.kv_indptr.size(), kv_indptr.get() + next_qo_indptr.size(),
              static_cast<int32_t>(checked.num_listed_pages));
    std::copy_n(batch.kv_indices.begin(), checked.num_listed_pages, kv_indices.get());
    std::swap(schedule, next_schedule);
    options = wanted;
    num_rows = config.bucket ? config.bucket->num_rows : checked.num_rows;
    num_tokens = checked.num_tokens;
    planned = true;
  }

  AttentionParams params_of(const RunArgs& args) {
    return {.geometry = config.geometry,
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
            .qo_indptr = qo_indptr.get(),
            .kv_indptr = kv_indptr.get(),
            .kv_indices = kv_indices.get(),
            .kv_len = kv_len.get(),
            .sm_scale = options.sm_scale,
            .causal = options.causal,
            .lse_base = options.lse_base,
            .partial_out = reinterpret_cast<float*>(scratch_memory + scratch.partial_out),
            .partial_lse = reinterpret_cast<float*>(scratch_memory + scratch.partial_lse)};
  }

  void require_plan(const char* where) const {
    if (!planned) {
      throw_state({.what = "plan", .where = where, .expected = "a plan before it", .got = "none"});
    }
  }

  TensorView<const int32_t, 1> index_view(const int32_t* data, int64_t size) const {
    return contiguous_view(data, std::array<int64_t, 1>{size}, config.device);
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

void PagedAttention::plan(const Batch& batch, const PlanOptions& options, Stream /*stream*/) {
  Impl& impl = *impl_;
  check_options(options);
  const CheckedBatch checked = check_batch(batch, impl.config, impl.next_kv_len);
  impl.pad_to_bucket(checked, batch);
  plan::make_schedule({.qo_indptr = impl.next_qo_indptr,
                       .kv_len = impl.next_kv_len,
                       .num_heads = impl.config.geometry.num_heads,
                       .causal = options.causal,
                       .num_workers = impl.choice.executor->num_threads(),
                       .splits = impl.config.splits},
                      impl.choice.cost_model, impl.next_schedule);
  impl.adopt_next(checked, batch, options);
}

void PagedAttention::run(const RunArgs& args, Stream /*stream*/) {
  Impl& impl = *impl_;
  impl.require_plan("PagedAttention::run");
  check_run(args, impl.config, impl.num_tokens);
  const int64_t tokens = args.q_nope.shape[0];
  if (tokens == 0) return;
  const bool whole_bucket = impl.config.bucket && tokens == impl.config.bucket->num_tokens;
  cpu::run_schedule(*impl.choice.impl, impl.params_of(args), impl.schedule,
                    static_cast<int32_t>(impl.num_rows + (whole_bucket ? 1 : 0)),
                    impl.scratch_memory + impl.scratch.worker_memory, impl.scratch.worker_stride,
                    *impl.choice.executor);
}

const std::string& PagedAttention::kernel() const noexcept { return impl_->kernel; }

PlanInfo PagedAttention::info() const {
  impl_->require_plan("PagedAttention::info");
  const plan::Schedule& schedule = impl_->schedule;
  const size_t row_bytes =
      (static_cast<size_t>(impl_->config.geometry.kv_lora_rank) + 1) * sizeof(float);
  return {.num_rows = impl_->num_rows,
          .num_tokens = impl_->num_tokens,
          .num_tiles = static_cast<int64_t>(schedule.tiles.size()),
          .num_splits = schedule.max_splits,
          .partial_bytes = static_cast<size_t>(schedule.num_partial_rows) * row_bytes};
}

TensorView<const int32_t, 1> PagedAttention::qo_indptr_buf() const {
  impl_->require_plan("PagedAttention::qo_indptr_buf");
  return impl_->index_view(impl_->qo_indptr.get(), impl_->num_rows + 1);
}

TensorView<const int32_t, 1> PagedAttention::kv_len_buf() const {
  impl_->require_plan("PagedAttention::kv_len_buf");
  return impl_->index_view(impl_->kv_len.get(), impl_->num_rows);
}

}  // namespace mla
