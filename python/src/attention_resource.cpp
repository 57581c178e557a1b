#include "config.hpp"
#include "export.hpp"
#include "pool.hpp"
#include "resources.hpp"

namespace mla::py {

namespace ffi = tvm::ffi;

namespace {

constexpr const char* kNew = "AttentionResource";

AttentionOptions options_from(const PoolBox& pool, const ffi::String& key, int64_t num_heads,
                              double sm_scale, int64_t lse_base, const Fields& limits,
                              const Fields& splits, bool capture, const ffi::String& kernel,
                              const ffi::Optional<ExecutorBox>& executor) {
  return {.key = std::string(key),
          .geometry = AttentionResource::geometry_of(*pool, narrow(num_heads, {"num_heads", kNew})),
          .sm_scale = static_cast<float>(sm_scale),
          .lse_base = static_cast<LseBase>(lse_base),
          .limits = limits_from(limits),
          .splits = splits_from(splits, kNew),
          .capture = capture,
          .kernel = std::string(kernel),
          .executor = executor_from(executor)};
}

AttentionResourceBox resource_make(const PoolBox& pool, const ffi::String& key, int64_t num_heads,
                                   double sm_scale, int64_t lse_base, const Fields& limits,
                                   const Fields& splits, bool capture, const ffi::String& kernel,
                                   const ffi::Optional<ExecutorBox>& executor,
                                   const ffi::String& kv_key,
                                   const ffi::Optional<ffi::Tensor>& scratch) {
  AttentionOptions options = options_from(pool, key, num_heads, sm_scale, lse_base, limits, splits,
                                          capture, kernel, executor);
  std::vector<ffi::ObjectRef> lenders{pool};
  if (scratch.has_value()) {
    options.scratch = bytes_of(*scratch, (*pool).config().device, {"scratch", kNew});
    lenders.push_back(*scratch);
  }
  return AttentionResourceBox::make(std::move(lenders), *pool, std::string(kv_key), options);
}

int64_t resource_scratch_bytes(const PoolBox& pool, const ffi::String& key, int64_t num_heads,
                               double sm_scale, int64_t lse_base, const Fields& limits,
                               const Fields& splits, bool capture, const ffi::String& kernel,
                               const ffi::Optional<ExecutorBox>& executor) {
  return static_cast<int64_t>(AttentionResource::scratch_bytes(
      *pool, options_from(pool, key, num_heads, sm_scale, lse_base, limits, splits, capture, kernel,
                          executor)));
}

void resource_set_cursor(const AttentionResourceBox& resource, const ffi::String& label,
                         int64_t layer) {
  (*resource).set_cursor(text_of(label), narrow(layer, {"layer", "AttentionResource::set_cursor"}));
}

void resource_run(const AttentionResourceBox& resource, ffi::TensorView q_nope,
                  const ffi::Optional<ffi::TensorView>& q_pe,
                  const ffi::Optional<ffi::TensorView>& ckv,
                  const ffi::Optional<ffi::TensorView>& kpe, ffi::TensorView out,
                  const ffi::Optional<ffi::TensorView>& lse,
                  const ffi::Optional<ffi::String>& label, const ffi::Optional<int64_t>& layer,
                  int64_t pass, int64_t stream) {
  constexpr const char* kWhere = "AttentionResource::run";
  AttendArgs args{.q_nope = view_of<3>(q_nope, {"q_nope", kWhere}),
                  .q_pe = view_of<3>(q_pe, {"q_pe", kWhere}),
                  .out = view_of<3>(out, {"out", kWhere}),
                  .lse = typed_view_of<float, 2>(lse, {"lse", kWhere}),
                  .pass = narrow(pass, {"pass", kWhere})};
  const ffi::String name = label.has_value() ? *label : ffi::String();
  if (label.has_value()) args.label = text_of(name);
  if (layer.has_value()) args.layer = narrow(*layer, {"layer", kWhere});
  if (ckv.has_value()) {
    args.cache = LatentViews{.ckv = view_of<3>(ckv, {"ckv", kWhere}),
                             .kpe = view_of<3>(kpe, {"kpe", kWhere})};
  }
  (*resource).run(args, stream_from(stream));
}

ffi::Tensor resource_qo_indptr_buf(const AttentionResourceBox& resource, const ffi::String& label,
                                   int64_t pass) {
  return share((*resource).qo_indptr_buf(text_of(label), narrow(pass, {"pass", kNew})), resource);
}

ffi::Tensor resource_kv_len_buf(const AttentionResourceBox& resource, const ffi::String& label,
                                int64_t pass) {
  return share((*resource).kv_len_buf(text_of(label), narrow(pass, {"pass", kNew})), resource);
}

void resource_select_last_hidden(const AttentionResourceBox& resource, ffi::TensorView hidden,
                                 ffi::TensorView out, const ffi::String& label, int64_t pass,
                                 int64_t stream) {
  constexpr const char* kWhere = "AttentionResource::select_last_hidden";
  (*resource).select_last_hidden(view_of<2>(hidden, {"hidden", kWhere}),
                                 view_of<2>(out, {"out", kWhere}), text_of(label),
                                 narrow(pass, {"pass", kWhere}), stream_from(stream));
}

ffi::String resource_kernel(const AttentionResourceBox& resource) { return (*resource).kernel(); }

}  // namespace

MLA_PY_EXPORT(resource_make)
MLA_PY_EXPORT(resource_scratch_bytes)
MLA_PY_EXPORT(resource_set_cursor)
MLA_PY_EXPORT(resource_run)
MLA_PY_EXPORT(resource_qo_indptr_buf)
MLA_PY_EXPORT(resource_kv_len_buf)
MLA_PY_EXPORT(resource_select_last_hidden)
MLA_PY_EXPORT(resource_kernel)

}  // namespace mla::py
