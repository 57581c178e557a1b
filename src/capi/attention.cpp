#include "mla/attention.hpp"

#include "capi/error.hpp"
#include "capi/executor.hpp"
#include "capi/from_c.hpp"

using namespace mla::capi;  // NOLINT(google-build-using-namespace): C calls live in no namespace

struct mla_attention {  // NOLINT(readability-identifier-naming): declared by mla.h
  mla::PagedAttention object;
};

namespace {

mla::AttentionConfig config_from_c(const mla_attention_config* config, const char* where) {
  const mla_attention_config given = read_struct(config, "config", where);
  mla::AttentionConfig read;
  read.geometry = geometry_from_c(given.geometry, where);
  read.num_pages = given.num_pages;
  read.device = device_from_c(given.device, "config", where);
  if (given.strides != nullptr) read.strides = strides_from_c(*given.strides);
  if (given.max_rows != 0) read.limits.max_rows = given.max_rows;
  if (given.max_tokens != 0) read.limits.max_tokens = given.max_tokens;
  if (given.max_listed_pages != 0) read.limits.max_listed_pages = given.max_listed_pages;
  if (given.bucket_rows != 0 || given.bucket_tokens != 0) {
    read.bucket = {.num_rows = given.bucket_rows, .num_tokens = given.bucket_tokens};
  }
  read.splits = {.fixed_tokens = given.fixed_split_tokens, .forced_count = given.forced_splits};
  read.capture = flag_from_c(given.capture, "config.capture", where);
  if (given.kernel != nullptr) read.kernel = given.kernel;
  if (given.executor != nullptr) read.executor = given.executor->shared;
  if (given.scratch != nullptr) {
    read.scratch = {static_cast<std::byte*>(given.scratch), given.scratch_bytes};
  }
  return read;
}

// `count` entries; null stands for none.
std::span<const int32_t> array_from_c(const int32_t* entries, int64_t count) {
  return entries == nullptr ? std::span<const int32_t>()
                            : std::span(entries, static_cast<size_t>(count));
}

mla::Batch batch_from_c(const mla_batch* batch, const char* where) {
  const mla_batch given = read_struct(batch, "batch", where);
  const auto check_count = [where](const char* name, int64_t count, int64_t most) {
    if (count >= 0 && count <= most) return;
    mla::throw_invalid({.what = name,
                        .where = where,
                        .expected = "0 to " + std::to_string(most),
                        .got = std::to_string(count)});
  };
  check_count("batch.num_rows", given.num_rows, mla::kMaxRows);
  check_count("batch.num_kv_indices", given.num_kv_indices, mla::kMaxListedPages);
  if (given.num_kv_indices > 0) not_null(given.kv_indices, "batch.kv_indices", where);
  return {.qo_indptr = array_from_c(&not_null(given.qo_indptr, "batch.qo_indptr", where),
                                    given.num_rows + 1),
          .kv_indptr = array_from_c(&not_null(given.kv_indptr, "batch.kv_indptr", where),
                                    given.num_rows + 1),
          .kv_indices = array_from_c(given.kv_indices, given.num_kv_indices),
          .kv_len = array_from_c(given.kv_len, given.num_rows),
          .kv_last_page_len = array_from_c(given.kv_last_page_len, given.num_rows)};
}

mla::RunArgs run_args_from_c(const mla_run_args* args, const char* where) {
  const mla_run_args given = read_struct(args, "args", where);
  return {.q_nope = tensor_from_c<3>(given.q_nope, "q_nope", where),
          .q_pe = tensor_from_c<3>(given.q_pe, "q_pe", where),
          .cache = {.ckv = tensor_from_c<3>(given.ckv, "ckv", where),
                    .kpe = tensor_from_c<3>(given.kpe, "kpe", where)},
          .out = tensor_from_c<3>(given.out, "out", where),
          .lse = lse_from_c(given.lse, "lse", where)};
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
    *attention = std::make_unique<mla_attention>(mla::PagedAttention(config_from_c(config, kWhere)))
                     .release();
  });
}

void mla_attention_destroy(mla_attention* attention) noexcept { delete attention; }

mla_status mla_attention_plan(mla_attention* attention, const mla_batch* batch,
                              const mla_plan_options* options, void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_plan";
    auto& object = not_null(attention, "attention", kWhere).object;
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
    auto& object = not_null(attention, "attention", kWhere).object;
    object.run(run_args_from_c(args, kWhere), {.handle = stream});
  });
}

mla_status mla_attention_info(const mla_attention* attention, mla_plan_info* info) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_info";
    const mla::PlanInfo current = not_null(attention, "attention", kWhere).object.info();
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
  return attention == nullptr ? nullptr : attention->object.kernel().c_str();
}

mla_status mla_attention_qo_indptr_buf(const mla_attention* attention,
                                       mla_tensor* buffer) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_qo_indptr_buf";
    not_null(buffer, "buffer", kWhere) =
        tensor_to_c(not_null(attention, "attention", kWhere).object.qo_indptr_buf());
  });
}

mla_status mla_attention_kv_len_buf(const mla_attention* attention, mla_tensor* buffer) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_kv_len_buf";
    not_null(buffer, "buffer", kWhere) =
        tensor_to_c(not_null(attention, "attention", kWhere).object.kv_len_buf());
  });
}
