#include "mla/step_tensors.hpp"

#include <array>

namespace mla::cli {

StepTensors::StepTensors(const Geometry& geometry, int64_t max_tokens)
    : geometry_(geometry), row_bytes_(geometry.latent_width() * size_of(geometry.dtype)) {
  const int64_t heads = max_tokens * geometry.num_heads;
  rows_.resize(static_cast<size_t>(max_tokens * row_bytes_));
  queries_.resize(static_cast<size_t>(heads * row_bytes_));
  out_.resize(static_cast<size_t>(heads * geometry.kv_lora_rank * size_of(geometry.dtype)));
  lse_.resize(static_cast<size_t>(heads));
}

int64_t StepTensors::bytes(const Geometry& geometry, int64_t max_tokens) {
  const int64_t width = geometry.latent_width();
  const int64_t of_a_head = (width + geometry.kv_lora_rank) * size_of(geometry.dtype);
  return max_tokens * (width * size_of(geometry.dtype) +
                       geometry.num_heads * (of_a_head + int64_t{sizeof(float)}));
}

StepViews StepTensors::views(int64_t num_tokens) {
  const int64_t heads = geometry_.num_heads;
  const int64_t width = geometry_.latent_width();
  const int64_t rank = geometry_.kv_lora_rank;
  const DType dtype = geometry_.dtype;
  return {
      .rows = contiguous_view(static_cast<const void*>(rows_.data()), std::array{num_tokens, width},
                              dtype),
      .queries = contiguous_view(static_cast<const void*>(queries_.data()),
                                 std::array{num_tokens, heads, width}, dtype),
      .out = contiguous_view(static_cast<void*>(out_.data()), std::array{num_tokens, heads, rank},
                             dtype),
      .lse = contiguous_view(lse_.data(), std::array{num_tokens, heads}),
  };
}

}  // namespace mla::cli
