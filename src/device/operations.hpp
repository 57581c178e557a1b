#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "mla/device.hpp"
#include "mla/executor.hpp"
#include "mla/merge.hpp"
#include "mla/pool.hpp"
#include "mla/tensor_view.hpp"

namespace mla::device {

/// One layer of a pool: num_slots rows of [ckv | kpe] without gaps.
struct LayerRows {
  std::byte* data = nullptr;
  int64_t num_slots = 0;
  int64_t ckv_bytes = 0;
  int64_t kpe_bytes = 0;

  int64_t row_bytes() const { return ckv_bytes + kpe_bytes; }
};

/// Rows beside the pool, strides in bytes.
struct SourceRows {
  const std::byte* ckv = nullptr;
  const std::byte* kpe = nullptr;  ///< not read where kpe_bytes is 0
  int64_t ckv_stride = 0;
  int64_t kpe_stride = 0;
};

/// All layers of a pool as pages.
struct PoolPages {
  std::byte* data = nullptr;
  int32_t num_layers = 0;
  int64_t layer_bytes = 0;
  int64_t page_bytes = 0;
};

/// What a device does around attention. Arguments are checked. Every call queues its work on the
/// stream (or does it, where the device is immediate), reads host spans before it returns, and can
/// be captured; none allocates device memory or waits.
class Operations {
 public:
  virtual ~Operations() = default;

  /// Row i goes to slot slots[i]; slots outside of the layer are skipped.
  virtual void scatter_rows(const LayerRows& layer, std::span<const int64_t> slots,
                            const SourceRows& rows, Stream stream) = 0;
  /// The same with slots that are read on the device when the work is done.
  virtual void scatter_rows_at(const LayerRows& layer, const int64_t* slots, int64_t num_rows,
                               const SourceRows& rows, Stream stream) = 0;
  /// Slot slots[i] goes to row i; the row of a negative slot is left alone.
  virtual void gather_rows(const LayerRows& layer, std::span<const int64_t> slots, std::byte* rows,
                           int64_t row_stride_bytes, Stream stream) = 0;
  /// In every layer, as if one after the other.
  virtual void copy_pages(const PoolPages& pool, std::span<const PageCopy> copies,
                          Stream stream) = 0;
  /// Row qo_indptr[i + 1] - 1 of hidden to row i of out, zeros where request i has no queries.
  /// qo_indptr is read on the device.
  virtual void select_last_rows(const int32_t* qo_indptr, const ConstTensor<2>& hidden,
                                const Tensor<2>& out, Stream stream) = 0;
  /// As mla::merge_states.
  virtual void merge_states(std::span<const PartialState> states, const Tensor<3>& out,
                            const TensorView<float, 2>& lse, LseBase base, Executor* executor,
                            Stream stream) = 0;
};

}  // namespace mla::device
