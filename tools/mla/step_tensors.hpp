#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mla/device_memory.hpp"
#include "mla/geometry.hpp"
#include "mla/tensor_view.hpp"

namespace mla::cli {

/// What a step reads and writes besides the cache (T query tokens, H heads), packed in its order.
struct StepViews {
  ConstTensor<2> rows;       ///< [T, latent], the new latent rows
  ConstTensor<3> queries;    ///< [T, H, latent]
  Tensor<3> out;             ///< [T, H, rank]
  TensorView<float, 2> lse;  ///< [T, H]
};

/// The memory of these for steps of up to `max_tokens` tokens, reused by every layer and step: on
/// the device, and beside it host memory that inputs are drawn into. On the CPU the two are one.
class StepTensors {
 public:
  StepTensors(const Geometry& geometry, int64_t max_tokens, Device device);

  /// Bytes that it takes on the device.
  static int64_t bytes(const Geometry& geometry, int64_t max_tokens);

  /// Of the first `num_tokens`, on the device.
  StepViews views(int64_t num_tokens);
  /// Where the data of one token is drawn to, on the host.
  std::byte* row(int64_t token) { return host_rows() + token * row_bytes_; }
  std::byte* query(int64_t token) { return host_queries() + token * query_bytes(); }
  /// Queues copies of what was drawn for the first `num_tokens` to the device.
  void upload(int64_t num_tokens, Stream stream);
  /// Reads one output row, out [rank] in the geometry's dtype, and returns its LSE. Waits for the
  /// stream.
  float read_row(int64_t token, int64_t head, std::span<std::byte> out, Stream stream) const;

 private:
  bool is_on_host() const { return rows_.device() == Device{}; }
  std::byte* host_rows() {
    return is_on_host() ? static_cast<std::byte*>(rows_.data()) : drawn_rows_.data();
  }
  std::byte* host_queries() {
    return is_on_host() ? static_cast<std::byte*>(queries_.data()) : drawn_queries_.data();
  }
  int64_t query_bytes() const { return geometry_.num_heads * row_bytes_; }

  Geometry geometry_;
  int64_t row_bytes_;
  DeviceMemory rows_, queries_, out_, lse_;
  std::vector<std::byte> drawn_rows_, drawn_queries_;  // empty on the CPU
};

}  // namespace mla::cli
