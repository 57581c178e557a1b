#include "cpu/operations.hpp"

#include <cstring>
#include <vector>

#include "cpu/merge_states.hpp"
#include "cpu/select_rows.hpp"

namespace mla::cpu {
namespace {

using device::LayerRows;
using device::PoolPages;
using device::SourceRows;

void scatter(const LayerRows& layer, std::span<const int64_t> slots, const SourceRows& rows) {
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0 || slots[i] >= layer.num_slots) continue;
    const auto row = static_cast<int64_t>(i);
    std::byte* target = layer.data + slots[i] * layer.row_bytes();
    std::memcpy(target, rows.ckv + row * rows.ckv_stride, static_cast<size_t>(layer.ckv_bytes));
    if (layer.kpe_bytes == 0) continue;
    std::memcpy(target + layer.ckv_bytes, rows.kpe + row * rows.kpe_stride,
                static_cast<size_t>(layer.kpe_bytes));
  }
}

void gather(const LayerRows& layer, std::span<const int64_t> slots, std::byte* rows,
            int64_t row_stride_bytes) {
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0) continue;
    std::memcpy(rows + static_cast<int64_t>(i) * row_stride_bytes,
                layer.data + slots[i] * layer.row_bytes(), static_cast<size_t>(layer.row_bytes()));
  }
}

void copy(const PoolPages& pool, std::span<const PageCopy> copies) {
  for (int32_t layer = 0; layer < pool.num_layers; ++layer) {
    std::byte* pages = pool.data + layer * pool.layer_bytes;
    for (const PageCopy& pair : copies) {
      std::memmove(pages + pair.to * pool.page_bytes, pages + pair.from * pool.page_bytes,
                   static_cast<size_t>(pool.page_bytes));
    }
  }
}

template <class T>
std::vector<T> keep(std::span<const T> values) {
  return {values.begin(), values.end()};
}

}  // namespace

void HostOperations::scatter_rows(const LayerRows& layer, std::span<const int64_t> slots,
                                  const SourceRows& rows, Stream stream) {
  if (runtime_.is_immediate()) return scatter(layer, slots, rows);
  runtime_.submit(stream, "append",
                  [layer, kept = keep(slots), rows] { scatter(layer, kept, rows); });
}

void HostOperations::scatter_rows_at(const LayerRows& layer, const int64_t* slots, int64_t num_rows,
                                     const SourceRows& rows, Stream stream) {
  const std::span<const int64_t> on_device(slots, static_cast<size_t>(num_rows));
  if (runtime_.is_immediate()) return scatter(layer, on_device, rows);
  runtime_.submit(stream, "append", [layer, on_device, rows] { scatter(layer, on_device, rows); });
}

void HostOperations::gather_rows(const LayerRows& layer, std::span<const int64_t> slots,
                                 std::byte* rows, int64_t row_stride_bytes, Stream stream) {
  if (runtime_.is_immediate()) return gather(layer, slots, rows, row_stride_bytes);
  runtime_.submit(stream, "gather", [layer, kept = keep(slots), rows, row_stride_bytes] {
    gather(layer, kept, rows, row_stride_bytes);
  });
}

void HostOperations::copy_pages(const PoolPages& pool, std::span<const PageCopy> copies,
                                Stream stream) {
  if (runtime_.is_immediate()) return copy(pool, copies);
  runtime_.submit(stream, "copy pages", [pool, kept = keep(copies)] { copy(pool, kept); });
}

void HostOperations::select_last_rows(const int32_t* qo_indptr, const ConstTensor<2>& hidden,
                                      const Tensor<2>& out, Stream stream) {
  if (runtime_.is_immediate()) return cpu::select_last_rows(qo_indptr, hidden, out);
  runtime_.submit(stream, "select rows",
                  [qo_indptr, hidden, out] { cpu::select_last_rows(qo_indptr, hidden, out); });
}

void HostOperations::merge_states(std::span<const PartialState> states, const Tensor<3>& out,
                                  const TensorView<float, 2>& lse, LseBase base, Executor* executor,
                                  Stream stream) {
  if (runtime_.is_immediate()) return cpu::merge_states(states, out, lse, base, executor);
  runtime_.submit(stream, "merge states", [kept = keep(states), out, lse, base] {
    cpu::merge_states(kept, out, lse, base, nullptr);
  });
}

}  // namespace mla::cpu
