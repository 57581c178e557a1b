#include "mla/step_tensors.hpp"

#include <array>

namespace mla::cli {

StepTensors::StepTensors(const Geometry& geometry, int64_t max_tokens, Device device)
    : geometry_(geometry), row_bytes_(geometry.latent_width() * size_of(geometry.dtype)) {
  const int64_t heads = max_tokens * geometry.num_heads;
  const auto memory = [device](int64_t bytes) {
    return DeviceMemory(device, static_cast<size_t>(bytes));
  };
  rows_ = memory(max_tokens * row_bytes_);
  queries_ = memory(heads * row_bytes_);
  out_ = memory(heads * geometry.kv_lora_rank * size_of(geometry.dtype));
  lse_ = memory(heads * int64_t{sizeof(float)});
  if (is_on_host()) return;
  drawn_rows_.resize(rows_.bytes());
  drawn_queries_.resize(queries_.bytes());
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
  const DType dtype = geometry_.dtype;
  const Device device = rows_.device();
  return {
      .rows = contiguous_view(rows_.data(), std::array{num_tokens, width}, dtype, device),
      .queries =
          contiguous_view(queries_.data(), std::array{num_tokens, heads, width}, dtype, device),
      .out = contiguous_view(out_.data(),
                             std::array{num_tokens, heads, int64_t{geometry_.kv_lora_rank}}, dtype,
                             device),
      .lse =
          contiguous_view(static_cast<float*>(lse_.data()), std::array{num_tokens, heads}, device),
  };
}

void StepTensors::upload(int64_t num_tokens, Stream stream) {
  if (is_on_host()) return;
  rows_.copy_from_host(host_rows(), static_cast<size_t>(num_tokens * row_bytes_), stream);
  queries_.copy_from_host(host_queries(), static_cast<size_t>(num_tokens * query_bytes()), stream);
}

float StepTensors::read_row(int64_t token, int64_t head, std::span<std::byte> out,
                            Stream stream) const {
  const auto at = static_cast<size_t>(token * geometry_.num_heads + head);
  float lse = 0;
  out_.copy_to_host(out.data(), out.size(), stream, at * out.size());
  lse_.copy_to_host(&lse, sizeof(lse), stream, at * sizeof(lse));
  synchronize(out_.device(), stream);
  return lse;
}

}  // namespace mla::cli
