#include "mla/attention.hpp"

#include "capi/error.hpp"
#include "capi/executor.hpp"
#include "capi/from_c.hpp"

using namespace mla::capi;  // NOLINT(google-build-using-namespace): C calls live in no namespace

struct mla_attention  // NOLINT(readability-identifier-naming): declared by mla.h
    : Handle<mla_attention> {
  static constexpr const char* kName = "mla_attention";
  explicit mla_attention(const mla::AttentionConfig& config) : object(config) {}

  mla::PagedAttention object;
};

namespace {

// All but the scratch.
mla::AttentionConfig config_from_c(const mla_attention_config* config, const char* where) {
  const mla_attention_config given = read_struct(config, "config", where);
  mla::AttentionConfig read;
  read.geometry = geometry_from_c(given.geometry, where);
  read.num_pages = given.num_pages;
  read.device = device_from_c(given.device, "config", where);
  if (given.strides != nullptr) read.strides = strides_from_c(*given.strides);
  read.limits = limits_from_c(given.max_rows, given.max_tokens, given.max_listed_pages);
  read.bucket = bucket_from_c(given.bucket_rows, given.bucket_tokens, "config", where);
  read.splits = {.fixed_tokens = given.fixed_split_tokens, .forced_count = given.forced_splits};
  read.capture = flag_from_c(given.capture, "config.capture", where);
  if (given.kernel != nullptr) read.kernel = given.kernel;
  read.executor = executor_from_c(given.executor, where);
  return read;
}

mla::Batch batch_from_c(const mla_batch* batch, const char* where) {
  const mla_batch given = read_struct(batch, "batch", where);
  check_count(given.num_rows, mla::kMaxRows, "batch.num_rows", where);
  const auto lengths = [&](const int32_t* array) {  // one of the two is left out
    return std::span(array, array == nullptr ? 0 : static_cast<size_t>(given.num_rows));
  };
  return {
      .qo_indptr = array_from_c(given.qo_indptr, given.num_rows + 1, "batch.qo_indptr", where),
      .kv_indptr = array_from_c(given.kv_indptr, given.num_rows + 1, "batch.kv_indptr", where),
      .kv_indices = array_from_c(given.kv_indices, given.num_kv_indices, "batch.kv_indices", where),
      .kv_len = lengths(given.kv_len),
      .kv_last_page_len = lengths(given.kv_last_page_len)};
}

mla::RunArgs run_args_from_c(const mla_run_args* args, const char* where) {
  const mla_run_args given = read_struct(args, "args", where);
  return {.q_nope = tensor_from_c<3>(given.q_nope, "q_nope", where),
          .q_pe = tensor_from_c<3>(given.q_pe, "q_pe", where),
          .cache = {.ckv = tensor_from_c<3>(given.ckv, "ckv", where),
                    .kpe = tensor_from_c<3>(given.kpe, "kpe", where)},
          .out = tensor_from_c<3>(given.out, "out", where),
          .lse = typed_from_c<float, 2>(given.lse, "lse", where)};
}

}  // namespace

mla_status mla_attention_scratch_bytes(const mla_attention_config* config, size_t* bytes) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_scratch_bytes";
    not_null(bytes, "bytes", kWhere) =
        mla::PagedAttention::scratch_bytes(config_from_c(config, kWhere));
  });
}

mla_status mla_attention_create(const mla_attention_config* config,
                                mla_attention** attention) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_create";
    not_null(attention, "attention", kWhere);
    mla::AttentionConfig wanted = config_from_c(config, kWhere);
    const mla_attention_config given = read_struct(config, "config", kWhere);
    wanted.scratch = lent_from_c(given.scratch, given.scratch_bytes, "config.scratch", kWhere);
    *attention = std::make_unique<mla_attention>(wanted).release();
  });
}

void mla_attention_destroy(mla_attention* attention) noexcept { destroy(attention); }

mla_status mla_attention_plan(mla_attention* attention, const mla_batch* batch,
                              const mla_plan_options* options, void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_plan";
    auto& object = handle_from_c(attention, "attention", kWhere).object;
    const mla_plan_options given = read_struct(options, "options", kWhere);
    object.plan(batch_from_c(batch, kWhere),
                {.sm_scale = given.sm_scale,
                 .causal = flag_from_c(given.causal, "options.causal", kWhere),
                 .lse_base = lse_base_from_c(given.lse_base, kWhere)},
                {.handle = stream});
  });
}

mla_status mla_attention_run(mla_attention* attention, const mla_run_args* args,
                             void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_run";
    auto& object = handle_from_c(attention, "attention", kWhere).object;
    object.run(run_args_from_c(args, kWhere), {.handle = stream});
  });
}

mla_status mla_attention_info(const mla_attention* attention, mla_plan_info* info) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_info";
    const mla::PlanInfo current = handle_from_c(attention, "attention", kWhere).object.info();
    write_struct({.struct_size = 0,
                  .num_rows = current.num_rows,
                  .num_tokens = current.num_tokens,
                  .num_tiles = current.num_tiles,
                  .num_splits = current.num_splits,
                  .partial_bytes = current.partial_bytes},
                 info, "info", kWhere);
  });
}

const char* mla_attention_kernel(const mla_attention* attention) noexcept {
  return is_handle(attention) ? attention->object.kernel().c_str() : nullptr;
}

mla_status mla_attention_qo_indptr_buf(const mla_attention* attention,
                                       mla_tensor* buffer) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_qo_indptr_buf";
    not_null(buffer, "buffer", kWhere) =
        tensor_to_c(handle_from_c(attention, "attention", kWhere).object.qo_indptr_buf());
  });
}

mla_status mla_attention_kv_len_buf(const mla_attention* attention, mla_tensor* buffer) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_kv_len_buf";
    not_null(buffer, "buffer", kWhere) =
        tensor_to_c(handle_from_c(attention, "attention", kWhere).object.kv_len_buf());
  });
}
