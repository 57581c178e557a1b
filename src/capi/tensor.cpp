#include "capi/error.hpp"
#include "capi/from_c.hpp"

mla_tensor mla_contiguous_tensor(void* data, int32_t dtype, int32_t rank,
                                 const int64_t* shape) noexcept {
  mla_tensor tensor{};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = -1;  // until all of it is in order
  if (rank < 1 || rank > MLA_MAX_RANK || shape == nullptr) return tensor;
  int64_t step = 1;
  for (int32_t d = rank - 1; d >= 0; --d) {
    tensor.shape[d] = shape[d];
    tensor.stride[d] = step;
    if (__builtin_mul_overflow(step, shape[d], &step)) return tensor;
  }
  tensor.rank = rank;
  return tensor;
}

mla_status mla_split_latent(const mla_tensor* layer, int64_t kv_lora_rank, mla_tensor* ckv,
                            mla_tensor* kpe) noexcept {
  using namespace mla::capi;  // NOLINT(google-build-using-namespace): the body of one C call
  return guard([&] {
    constexpr const char* kWhere = "mla_split_latent";
    const auto view = tensor_from_c<3>(not_null(layer, "layer", kWhere), "layer", kWhere);
    not_null(ckv, "ckv", kWhere);
    not_null(kpe, "kpe", kWhere);
    if (kv_lora_rank < 1 || kv_lora_rank > view.shape[2]) {
      mla::throw_invalid({.what = "kv_lora_rank",
                          .where = kWhere,
                          .expected = "1 to " + std::to_string(view.shape[2]) + " = layer.shape[2]",
                          .got = std::to_string(kv_lora_rank)});
    }
    const mla::LatentViews views = mla::split_latent(view, kv_lora_rank);
    *ckv = tensor_to_c(views.ckv);
    *kpe = tensor_to_c(views.kpe);
  });
}
