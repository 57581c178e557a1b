#pragma once

#include "device/operations.hpp"

namespace mla::cuda {

/// Each call is one launch, or a few where a host list is longer than a launch's parameters. Host
/// lists travel inside the launches: nothing is staged, nothing can be overwritten too early.
class CudaOperations final : public device::Operations {
 public:
  explicit CudaOperations(int32_t index) : index_(index) {}

  /// Loads the kernels, for which a first launch might have to wait for the device.
  void prepare();

  void scatter_rows(const device::LayerRows& layer, std::span<const int64_t> slots,
                    const device::SourceRows& rows, Stream stream) override;
  void scatter_rows_at(const device::LayerRows& layer, const int64_t* slots, int64_t num_rows,
                       const device::SourceRows& rows, Stream stream) override;
  void gather_rows(const device::LayerRows& layer, std::span<const int64_t> slots, std::byte* rows,
                   int64_t row_stride_bytes, Stream stream) override;
  void copy_pages(const device::PoolPages& pool, std::span<const PageCopy> copies,
                  Stream stream) override;
  void select_last_rows(const int32_t* qo_indptr, const ConstTensor<2>& hidden,
                        const Tensor<2>& out, Stream stream) override;
  /// At most 256 states.
  void merge_states(std::span<const PartialState> states, const Tensor<3>& out,
                    const TensorView<float, 2>& lse, LseBase base, Executor* executor,
                    Stream stream) override;

 private:
  int32_t index_;
};

}  // namespace mla::cuda
