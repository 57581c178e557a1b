#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mla/device_memory.hpp"
#include "mla/executor.hpp"
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

/// What a token's latent row and its queries are drawn from (Content).
struct TokenKeys {
  uint64_t row = 0;
  uint64_t query = 0;
};

/// The memory of these for steps of up to `max_tokens` tokens, reused by every layer and step.
class StepTensors {
 public:
  StepTensors(const Geometry& geometry, int64_t max_tokens, Device device);

  /// Bytes that it takes on the device.
  static int64_t bytes(const Geometry& geometry, int64_t max_tokens);

  /// Of the first `num_tokens`, on the device.
  StepViews views(int64_t num_tokens);
  /// Draws rows and queries of the first tokens where they are: on the CPU with all threads of the
  /// executor, on a GPU with a kernel behind what is queued on the stream. The keys are free again.
  void draw(std::span<const TokenKeys> keys, Executor& executor, Stream stream);
  /// Reads one output row, out [rank] in the geometry's dtype, and returns its LSE. Waits for the
  /// stream.
  float read_row(int64_t token, int64_t head, std::span<std::byte> out, Stream stream) const;

 private:
  void draw_on_host(std::span<const TokenKeys> keys, Executor& executor);
  void draw_on_gpu(std::span<const TokenKeys> keys, Stream stream);
  int64_t query_columns() const { return geometry_.num_heads * geometry_.latent_width(); }

  Geometry geometry_;
  DeviceMemory rows_, queries_, out_, lse_;
  DeviceMemory keys_;                // [2 * max_tokens]: of rows, then of queries; on a GPU alone
  std::vector<uint64_t> host_keys_;  // the same
};

}  // namespace mla::cli
