#include "pool.hpp"

#include <vector>

#include "config.hpp"
#include "export.hpp"

namespace mla::py {

namespace ffi = tvm::ffi;

namespace {

/// shape: num_layers, num_pages, page_size, kv_lora_rank, qk_rope_head_dim, dtype.
PoolConfig config_from(const Fields& shape, int64_t device_kind, int64_t device_index) {
  constexpr const char* kWhere = "LatentPool";
  return {.num_layers = narrow(shape[0], {"num_layers", kWhere}),
          .num_pages = shape[1],
          .page_size = narrow(shape[2], {"page_size", kWhere}),
          .kv_lora_rank = narrow(shape[3], {"kv_lora_rank", kWhere}),
          .qk_rope_head_dim = narrow(shape[4], {"qk_rope_head_dim", kWhere}),
          .dtype = static_cast<DType>(shape[5]),
          .device = device_from(device_kind, device_index)};
}

PoolBox pool_make(const Fields& shape, int64_t device_kind, int64_t device_index,
                  const ffi::Optional<ffi::Tensor>& memory) {
  PoolConfig config = config_from(shape, device_kind, device_index);
  if (!memory.has_value()) return PoolBox::make({}, config);
  config.memory = bytes_of(*memory, config.device, {"memory", "LatentPool"});
  return PoolBox::make({*memory}, config);
}

int64_t pool_bytes(const Fields& shape, int64_t device_kind, int64_t device_index) {
  return static_cast<int64_t>(LatentPool::bytes(config_from(shape, device_kind, device_index)));
}

ffi::Tensor pool_layer(const PoolBox& pool, int64_t layer) {
  return share((*pool).layer(narrow(layer, {"layer", "LatentPool::layer"})), pool);
}

/// ckv and kpe; the second is left out at rope width 0.
ffi::Array<ffi::Tensor> pool_views(const PoolBox& pool, int64_t layer) {
  const LatentViews views = (*pool).views(narrow(layer, {"layer", "LatentPool::views"}));
  ffi::Array<ffi::Tensor> parts{share(views.ckv, pool)};
  if (views.kpe.shape[2] > 0) parts.push_back(share(views.kpe, pool));
  return parts;
}

void pool_append(const PoolBox& pool, int64_t layer, ffi::TensorView slots, ffi::TensorView ckv,
                 const ffi::Optional<ffi::TensorView>& kpe, int64_t stream) {
  constexpr const char* kWhere = "LatentPool::append";
  const int32_t layer_idx = narrow(layer, {"layer", kWhere});
  const Tensor<2> ckv_rows = view_of<2>(ckv, {"ckv", kWhere});
  const Tensor<2> kpe_rows = view_of<2>(kpe, {"kpe", kWhere});
  if (device_of(slots, {"slots", kWhere}).kind == DeviceKind::kCpu) {
    (*pool).append(layer_idx, host_span_of<int64_t>(slots, {"slots", kWhere}), ckv_rows, kpe_rows,
                   stream_from(stream));
  } else {
    (*pool).append_at(layer_idx, typed_view_of<int64_t, 1>(slots, {"slots", kWhere}), ckv_rows,
                      kpe_rows, stream_from(stream));
  }
}

void pool_gather(const PoolBox& pool, int64_t layer, ffi::TensorView slots, ffi::TensorView rows,
                 int64_t stream) {
  constexpr const char* kWhere = "LatentPool::gather";
  (*pool).gather(narrow(layer, {"layer", kWhere}), host_span_of<int64_t>(slots, {"slots", kWhere}),
                 view_of<2>(rows, {"rows", kWhere}), stream_from(stream));
}

/// pages: from, to, from, to ...
void pool_copy_pages(const PoolBox& pool, const Fields& pages, int64_t stream) {
  constexpr const char* kWhere = "LatentPool::copy_pages";
  std::vector<PageCopy> copies;
  copies.reserve(pages.size() / 2);
  for (size_t i = 0; i + 1 < pages.size(); i += 2) {
    copies.push_back({narrow(pages[i], {"from", kWhere}), narrow(pages[i + 1], {"to", kWhere})});
  }
  (*pool).copy_pages(copies, stream_from(stream));
}

}  // namespace

MLA_PY_EXPORT(pool_make)
MLA_PY_EXPORT(pool_bytes)
MLA_PY_EXPORT(pool_layer)
MLA_PY_EXPORT(pool_views)
MLA_PY_EXPORT(pool_append)
MLA_PY_EXPORT(pool_gather)
MLA_PY_EXPORT(pool_copy_pages)

}  // namespace mla::py
