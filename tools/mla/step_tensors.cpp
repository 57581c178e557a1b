#include "mla/step_tensors.hpp"

#include <array>

#include "cases/random.hpp"

namespace mla::cli {

StepTensors::StepTensors(const Geometry& geometry, int64_t max_tokens, Device device)
    : geometry_(geometry) {
  const int64_t heads = max_tokens * geometry.num_heads;
  const int64_t row_bytes = geometry.latent_width() * size_of(geometry.dtype);
  const auto memory = [device](int64_t bytes) {
    return DeviceMemory(device, static_cast<size_t>(bytes));
  };
  rows_ = memory(max_tokens * row_bytes);
  queries_ = memory(heads * row_bytes);
  out_ = memory(heads * geometry.kv_lora_rank * size_of(geometry.dtype));
  lse_ = memory(heads * int64_t{sizeof(float)});
  if (device == Device{}) return;
  host_keys_.resize(static_cast<size_t>(2 * max_tokens));
  keys_ = memory(2 * max_tokens * int64_t{sizeof(uint64_t)});
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

void StepTensors::draw(std::span<const TokenKeys> keys, Executor& executor, Stream stream) {
  if (rows_.device() == Device{}) {
    draw_on_host(keys, executor);
  } else {
    draw_on_gpu(keys, stream);
  }
}

void StepTensors::draw_on_host(std::span<const TokenKeys> keys, Executor& executor) {
  const DType dtype = geometry_.dtype;
  const int64_t width = geometry_.latent_width();
  const auto at = [&](const DeviceMemory& memory, size_t token, int64_t columns) {
    return static_cast<std::byte*>(memory.data()) +
           static_cast<int64_t>(token) * columns * size_of(dtype);
  };
  const auto num_workers = static_cast<size_t>(executor.num_threads());
  executor.run([&](int worker) {
    for (auto t = static_cast<size_t>(worker); t < keys.size(); t += num_workers) {
      cases::fill_uniform(keys[t].row, dtype, at(rows_, t, width), width);
      cases::fill_uniform(keys[t].query, dtype, at(queries_, t, query_columns()), query_columns());
    }
  });
}

void StepTensors::draw_on_gpu(std::span<const TokenKeys> keys, Stream stream) {
  const Device device = rows_.device();
  const size_t count = keys.size();
  synchronize(device, stream);  // no copy reads the host's keys any more
  for (size_t t = 0; t < count; ++t) {
    host_keys_[t] = keys[t].row;
    host_keys_[count + t] = keys[t].query;
  }
  keys_.copy_from_host(host_keys_.data(), 2 * count * sizeof(uint64_t), stream);
  const auto* on_gpu = static_cast<const uint64_t*>(keys_.data());
  const auto rows = static_cast<int64_t>(count);
  cases::fill_uniform_rows(on_gpu, rows, geometry_.dtype, rows_.data(), geometry_.latent_width(),
                           device, stream);
  cases::fill_uniform_rows(on_gpu + count, rows, geometry_.dtype, queries_.data(), query_columns(),
                           device, stream);
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
