#pragma once

#include "layer/operations.hpp"
#include "mla/device_memory.hpp"
#include "mla/layer.hpp"

namespace mla::layer {

/// A weight on the device in the layer's dtype, [out, in] without gaps.
struct Weight {
  DeviceMemory memory;
  ConstTensor<2> rows{};

  /// As gemm takes it.
  ConstTensor<3> matrix() const {
    return {rows.data,
            {1, rows.shape[0], rows.shape[1]},
            {0, rows.stride[0], 1},
            rows.device,
            rows.dtype};
  }
};

/// A rank's own copies of a layer's weights, on its device, and the tables of its rotation.
class RankWeights {
 public:
  /// Checks the weights. `options.heads` is resolved. Returns when the copies are done. Throws
  /// InvalidArgument naming the weight, std::bad_alloc, CudaError.
  RankWeights(const LayerConfig& config, const LayerWeights& weights, const LayerOptions& options);

  Weight q_proj, q_a_proj, q_b_proj, kv_a_proj, kv_b_proj, o_proj;
  Norm q_norm{}, kv_norm{};
  Rope rope{};

 private:
  DeviceMemory q_norm_, kv_norm_, frequencies_;
};

}  // namespace mla::layer
