#include "attention.hpp"

#include "config.hpp"
#include "export.hpp"

namespace mla::py {

namespace ffi = tvm::ffi;

namespace {

constexpr const char* kNew = "PagedAttention";

AttentionConfig config_from(const Fields& geometry, int64_t num_pages, int64_t device_kind,
                            int64_t device_index, const ffi::Optional<Fields>& strides,
                            const Fields& limits, const ffi::Optional<Fields>& bucket, bool capture,
                            const Fields& splits, const ffi::String& kernel,
                            const ffi::Optional<ExecutorBox>& executor) {
  AttentionConfig config{.geometry = geometry_from(geometry, kNew),
                         .num_pages = num_pages,
                         .device = device_from(device_kind, device_index),
                         .strides = strides_from(strides),
                         .limits = limits_from(limits),
                         .capture = capture,
                         .splits = splits_from(splits, kNew),
                         .kernel = kernel,
                         .executor = executor_from(executor)};
  if (bucket.has_value()) config.bucket = Bucket{(*bucket)[0], (*bucket)[1]};
  return config;
}

AttentionBox attention_make(const Fields& geometry, int64_t num_pages, int64_t device_kind,
                            int64_t device_index, const ffi::Optional<Fields>& strides,
                            const Fields& limits, const ffi::Optional<Fields>& bucket, bool capture,
                            const Fields& splits, const ffi::String& kernel,
                            const ffi::Optional<ExecutorBox>& executor,
                            const ffi::Optional<ffi::Tensor>& scratch) {
  AttentionConfig config = config_from(geometry, num_pages, device_kind, device_index, strides,
                                       limits, bucket, capture, splits, kernel, executor);
  if (!scratch.has_value()) return AttentionBox::make({}, config);
  config.scratch = bytes_of(*scratch, config.device, {"scratch", kNew});
  return AttentionBox::make({*scratch}, config);
}

int64_t attention_scratch_bytes(const Fields& geometry, int64_t num_pages, int64_t device_kind,
                                int64_t device_index, const ffi::Optional<Fields>& strides,
                                const Fields& limits, const ffi::Optional<Fields>& bucket,
                                bool capture, const Fields& splits, const ffi::String& kernel,
                                const ffi::Optional<ExecutorBox>& executor) {
  return static_cast<int64_t>(PagedAttention::scratch_bytes(
      config_from(geometry, num_pages, device_kind, device_index, strides, limits, bucket, capture,
                  splits, kernel, executor)));
}

void attention_plan(const AttentionBox& attention, ffi::TensorView qo_indptr,
                    ffi::TensorView kv_indptr, ffi::TensorView kv_indices,
                    const ffi::Optional<ffi::TensorView>& kv_len,
                    const ffi::Optional<ffi::TensorView>& kv_last_page_len, double sm_scale,
                    bool causal, int64_t lse_base, int64_t stream) {
  constexpr const char* kWhere = "PagedAttention::plan";
  (*attention)
      .plan({.qo_indptr = host_span_of<int32_t>(qo_indptr, {"qo_indptr", kWhere}),
             .kv_indptr = host_span_of<int32_t>(kv_indptr, {"kv_indptr", kWhere}),
             .kv_indices = host_span_of<int32_t>(kv_indices, {"kv_indices", kWhere}),
             .kv_len = host_span_of<int32_t>(kv_len, {"kv_len", kWhere}),
             .kv_last_page_len =
                 host_span_of<int32_t>(kv_last_page_len, {"kv_last_page_len", kWhere})},
            {.sm_scale = static_cast<float>(sm_scale),
             .causal = causal,
             .lse_base = static_cast<LseBase>(lse_base)},
            stream_from(stream));
}

void attention_run(const AttentionBox& attention, ffi::TensorView q_nope,
                   const ffi::Optional<ffi::TensorView>& q_pe, ffi::TensorView ckv,
                   const ffi::Optional<ffi::TensorView>& kpe, ffi::TensorView out,
                   const ffi::Optional<ffi::TensorView>& lse, int64_t stream) {
  constexpr const char* kWhere = "PagedAttention::run";
  (*attention)
      .run({.q_nope = view_of<3>(q_nope, {"q_nope", kWhere}),
            .q_pe = view_of<3>(q_pe, {"q_pe", kWhere}),
            .cache = {.ckv = view_of<3>(ckv, {"ckv", kWhere}),
                      .kpe = view_of<3>(kpe, {"kpe", kWhere})},
            .out = view_of<3>(out, {"out", kWhere}),
            .lse = typed_view_of<float, 2>(lse, {"lse", kWhere})},
           stream_from(stream));
}

void attention_order_replay(const AttentionBox& attention, int64_t stream) {
  (*attention).order_replay(stream_from(stream));
}

ffi::String attention_kernel(const AttentionBox& attention) { return (*attention).kernel(); }

ffi::Array<int64_t> attention_info(const AttentionBox& attention) {
  const PlanInfo info = (*attention).info();
  return {info.num_rows, info.num_tokens, info.num_tiles, info.num_splits,
          static_cast<int64_t>(info.partial_bytes)};
}

ffi::Tensor attention_qo_indptr_buf(const AttentionBox& attention) {
  return share((*attention).qo_indptr_buf(), attention);
}

ffi::Tensor attention_kv_len_buf(const AttentionBox& attention) {
  return share((*attention).kv_len_buf(), attention);
}

}  // namespace

MLA_PY_EXPORT(attention_make)
MLA_PY_EXPORT(attention_scratch_bytes)
MLA_PY_EXPORT(attention_plan)
MLA_PY_EXPORT(attention_run)
MLA_PY_EXPORT(attention_order_replay)
MLA_PY_EXPORT(attention_kernel)
MLA_PY_EXPORT(attention_info)
MLA_PY_EXPORT(attention_qo_indptr_buf)
MLA_PY_EXPORT(attention_kv_len_buf)

}  // namespace mla::py
