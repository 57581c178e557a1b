#pragma once

#include <optional>

#include "mla/device.hpp"

namespace mla::cli {

/// What a card gives at most, measured in the run that it is quoted in.
struct Ceilings {
  double read_gbps = 0;                 ///< device memory, one large range
  std::optional<double> matrix_tflops;  ///< a bf16 product of 8192^3; none where cuBLAS is absent
  double empty_node_us = 0;             ///< a kernel that does nothing, in a replayed graph
};

/// Of a GPU. Takes half a second and 1 GiB. Throws std::bad_alloc, CudaError.
Ceilings measure_ceilings(Device device);

/// The best of a few bf16 products of 8192^3 through the layer's operations, in TFLOP/s; none
/// where the build has no layer or the machine no cuBLAS.
std::optional<double> measure_matrix_tflops(Device device);

}  // namespace mla::cli
