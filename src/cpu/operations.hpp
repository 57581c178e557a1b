#pragma once

#include "device/operations.hpp"
#include "device/runtime.hpp"

namespace mla::cpu {

/// Operations on memory that the host can reach: done at once, or submitted to the runtime where
/// it queues its work.
class HostOperations final : public device::Operations {
 public:
  explicit HostOperations(device::Runtime& runtime) : runtime_(runtime) {}

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
  void merge_states(std::span<const PartialState> states, const Tensor<3>& out,
                    const TensorView<float, 2>& lse, LseBase base, Executor* executor,
                    Stream stream) override;

 private:
  device::Runtime& runtime_;
};

}  // namespace mla::cpu
