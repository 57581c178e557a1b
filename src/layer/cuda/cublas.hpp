#pragma once

#include <cublas_v2.h>

#include "mla/device_memory.hpp"
#include "mla/tensor_view.hpp"

namespace mla::layer::cuda {

/// Throws InvalidArgument, with the dynamic linker's words, where there is no cuBLAS 12 or 13.
void check_cublas();

/// A handle of cuBLAS with scratch of its own, for one caller at a time. The library is looked for
/// at the first use in the process and never linked, so that one binary also serves machines
/// without it.
class Cublas {
 public:
  /// Takes the scratch and runs a product of every kind, so that cuBLAS has made what it makes
  /// once. Throws InvalidArgument (no cuBLAS), std::bad_alloc, CudaError.
  explicit Cublas(Device device);
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  size_t bytes() const { return scratch_.bytes(); }

  /// As Operations::gemm; fp32, bf16 and fp16. Sums are fp32: no TF32, and no partial sums in the
  /// dtype of the operands.
  void gemm(const ConstTensor<3>& x, const ConstTensor<3>& w, const Tensor<3>& y, Stream stream);

 private:
  void warm_up();

  Device device_;
  DeviceMemory scratch_;
  cublasHandle_t handle_ = nullptr;
};

}  // namespace mla::layer::cuda
