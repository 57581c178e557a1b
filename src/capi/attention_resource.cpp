#include "capi/attention_resource.hpp"

#include "capi/error.hpp"
#include "capi/executor.hpp"
#include "capi/from_c.hpp"

using namespace mla::capi;  // NOLINT(google-build-using-namespace): C calls live in no namespace

namespace {

// All but the scratch.
mla::AttentionOptions options_from_c(const mla_attention_options& given,
                                     const mla::LatentPool& pool, const char* where) {
  mla::AttentionOptions read;
  read.key = name_from_c(given.key, read.key.c_str());
  read.geometry = mla::AttentionResource::geometry_of(pool, given.num_heads);
  read.sm_scale = given.sm_scale;
  read.lse_base = lse_base_from_c(given.lse_base, where);
  read.limits = limits_from_c(given.max_rows, given.max_tokens, given.max_listed_pages);
  read.splits = {.fixed_tokens = given.fixed_split_tokens, .forced_count = given.forced_splits};
  read.capture = flag_from_c(given.capture, "options.capture", where);
  read.kernel = name_from_c(given.kernel, "");
  read.executor = executor_from_c(given.executor, where);
  return read;
}

mla::AttentionResource& attention_from_c(const mla_attention_resource* attention,
                                         const char* where) {
  return handle_from_c(attention, "attention", where).shared->attention;
}

mla::AttendArgs args_from_c(const mla_attend_args* args, const char* where) {
  const mla_attend_args given = read_struct(args, "args", where);
  mla::AttendArgs read{.q_nope = tensor_from_c<3>(given.q_nope, "q_nope", where),
                       .q_pe = tensor_from_c<3>(given.q_pe, "q_pe", where),
                       .out = tensor_from_c<3>(given.out, "out", where),
                       .lse = typed_from_c<float, 2>(given.lse, "lse", where),
                       .label = std::nullopt,
                       .layer = std::nullopt,
                       .cache = std::nullopt,
                       .pass = given.pass};
  if (given.label != nullptr) read.label = given.label;
  if (!flag_from_c(given.layer_from_cursor, "args.layer_from_cursor", where)) {
    read.layer = given.layer;
  } else if (given.layer != 0) {
    mla::throw_invalid({.what = "args.layer",
                        .where = where,
                        .expected = "0, since the cursor's is taken",
                        .got = std::to_string(given.layer)});
  }
  const mla::LatentViews cache{.ckv = tensor_from_c<3>(given.ckv, "ckv", where),
                               .kpe = tensor_from_c<3>(given.kpe, "kpe", where)};
  if (given.ckv.rank != 0 || given.kpe.rank != 0) read.cache = cache;
  return read;
}

}  // namespace

mla_status mla_attention_resource_scratch_bytes(const mla_kv_resource* kv,
                                                const mla_attention_options* options,
                                                size_t* bytes) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_resource_scratch_bytes";
    const mla::LatentPool& pool = *handle_from_c(kv, "kv", kWhere).shared->pool;
    const mla_attention_options given = read_struct(options, "options", kWhere);
    not_null(bytes, "bytes", kWhere) =
        mla::AttentionResource::scratch_bytes(pool, options_from_c(given, pool, kWhere));
  });
}

mla_status mla_attention_resource_create(const mla_kv_resource* kv,
                                         const mla_attention_options* options,
                                         mla_attention_resource** attention) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_resource_create";
    const auto& streams = handle_from_c(kv, "kv", kWhere).shared;
    not_null(attention, "attention", kWhere);
    const mla_attention_options given = read_struct(options, "options", kWhere);
    mla::AttentionOptions wanted = options_from_c(given, *streams->pool, kWhere);
    wanted.scratch = lent_from_c(given.scratch, given.scratch_bytes, "options.scratch", kWhere);
    *attention = std::make_unique<mla_attention_resource>(streams, wanted).release();
  });
}

void mla_attention_resource_destroy(mla_attention_resource* attention) noexcept {
  destroy(attention);
}

mla_status mla_attention_resource_set_cursor(mla_attention_resource* attention, const char* label,
                                             int32_t layer) noexcept {
  return guard([&] {
    attention_from_c(attention, "mla_attention_resource_set_cursor")
        .set_cursor(name_from_c(label, kMainLabel), layer);
  });
}

mla_status mla_attention_resource_run(mla_attention_resource* attention,
                                      const mla_attend_args* args, void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_resource_run";
    auto& resource = attention_from_c(attention, kWhere);
    resource.run(args_from_c(args, kWhere), {.handle = stream});
  });
}

mla_status mla_attention_resource_qo_indptr_buf(const mla_attention_resource* attention,
                                                const char* label, int32_t pass,
                                                mla_tensor* buffer) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_resource_qo_indptr_buf";
    const auto& resource = attention_from_c(attention, kWhere);
    not_null(buffer, "buffer", kWhere) =
        tensor_to_c(resource.qo_indptr_buf(name_from_c(label, kMainLabel), pass));
  });
}

mla_status mla_attention_resource_kv_len_buf(const mla_attention_resource* attention,
                                             const char* label, int32_t pass,
                                             mla_tensor* buffer) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_resource_kv_len_buf";
    const auto& resource = attention_from_c(attention, kWhere);
    not_null(buffer, "buffer", kWhere) =
        tensor_to_c(resource.kv_len_buf(name_from_c(label, kMainLabel), pass));
  });
}

mla_status mla_attention_resource_select_last_hidden(const mla_attention_resource* attention,
                                                     const char* label, int32_t pass,
                                                     const mla_tensor* hidden,
                                                     const mla_tensor* out, void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_attention_resource_select_last_hidden";
    attention_from_c(attention, kWhere)
        .select_last_hidden(tensor_from_c<2>(hidden, "hidden", kWhere),
                            tensor_from_c<2>(out, "out", kWhere), name_from_c(label, kMainLabel),
                            pass, {.handle = stream});
  });
}

const char* mla_attention_resource_kernel(const mla_attention_resource* attention) noexcept {
  return is_handle(attention) ? attention->shared->attention.kernel().c_str() : nullptr;
}

int32_t mla_attention_resource_uses_kernel(const mla_attention_resource* attention) noexcept {
  return is_handle(attention) && attention->shared->attention.uses_kernel() ? 1 : 0;
}
