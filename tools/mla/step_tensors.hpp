#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

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

/// The memory of these for steps of up to `max_tokens` tokens, reused by every layer and step. Host
/// memory, which is the CPU's device memory.
class StepTensors {
 public:
  StepTensors(const Geometry& geometry, int64_t max_tokens);

  /// Bytes that it takes.
  static int64_t bytes(const Geometry& geometry, int64_t max_tokens);

  /// Of the first `num_tokens`.
  StepViews views(int64_t num_tokens);
  /// Where the data of one token is drawn to.
  void* row(int64_t token) { return rows_.data() + token * row_bytes_; }
  void* query(int64_t token) { return queries_.data() + token * geometry_.num_heads * row_bytes_; }

 private:
  Geometry geometry_;
  int64_t row_bytes_;
  std::vector<std::byte> rows_, queries_, out_;
  std::vector<float> lse_;
};

}  // namespace mla::cli
