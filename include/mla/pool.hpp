#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "mla/device.hpp"
#include "mla/dtype.hpp"
#include "mla/export.hpp"
#include "mla/geometry.hpp"
#include "mla/tensor_view.hpp"

namespace mla {

namespace device {
class Operations;
struct LayerRows;
}  // namespace device
namespace engine {
class PoolClaim;
}

struct PoolConfig {
  int32_t num_layers = 1;
  int64_t num_pages = 0;  ///< usable pages, 1 to 2^31 - 2; the pool holds one more, the sink
  int32_t page_size = 0;  ///< tokens of a page, >= 1
  int32_t kv_lora_rank = 0;
  int32_t qk_rope_head_dim = 0;
  DType dtype = DType::kBFloat16;  ///< fp32, bf16 or fp16
  Device device{};
  /// At least LatentPool::bytes(config), 64-byte aligned, on the device; it must outlive the pool.
  /// Empty: the pool owns its memory, and pages that nobody wrote to cost none.
  std::span<std::byte> memory{};
};

/// Copies page `from` to page `to`.
struct PageCopy {
  int32_t from = 0;
  int32_t to = 0;
};

/// The paged latent cache, [layers, pages, page_size, kv_lora_rank + qk_rope_head_dim]. A slot is
/// page * page_size + offset in the page, 64 bits wide. Pages 0 .. num_pages - 1 are for requests;
/// page num_pages is the sink, where an engine may write padded rows and which is never read.
///
/// append, append_at, gather and copy_pages block on the CPU and queue their work elsewhere, where
/// they throw CudaError.
///
/// The pool knows no owners: a KvResource, one at a time, hands out its pages. Calls that write the
/// same slots must not overlap. It must not be moved or destroyed while work on it is queued or a
/// resource has it.
class MLA_API LatentPool {
 public:
  /// Throws InvalidArgument (a value out of range, lent memory too small or not aligned: the
  /// message gives both; a device that is not there), std::bad_alloc, CudaError. Owned memory is
  /// zero until it is written.
  explicit LatentPool(const PoolConfig& config);
  ~LatentPool();
  LatentPool(LatentPool&& other) noexcept;
  LatentPool& operator=(LatentPool&& other) noexcept;

  /// Exact bytes of a pool, the sink included. Throws InvalidArgument as the constructor;
  /// config.memory is not read.
  static size_t bytes(const PoolConfig& config);

  const PoolConfig& config() const noexcept { return config_; }
  /// Pages of every layer view, the sink included: what AttentionConfig::num_pages counts.
  int64_t total_pages() const noexcept { return config_.num_pages + 1; }
  int32_t sink_page() const noexcept { return static_cast<int32_t>(config_.num_pages); }

  /// One layer, [total_pages, page_size, latent]. Throws InvalidArgument (layer).
  Tensor<3> layer(int32_t layer);
  ConstTensor<3> layer(int32_t layer) const;
  /// Its two parts, as RunArgs::cache takes them.
  LatentViews views(int32_t layer) const;

  /// Scatters row i to slots[i]; -1 skips the row. No other byte of the pool changes. Of rows with
  /// one slot the last stays on the CPU, any on an accelerator.
  /// slots  [n] int64, -1 .. total_pages * page_size - 1
  /// ckv    [n, kv_lora_rank], any row stride; kpe [n, qk_rope_head_dim], ignored at width 0
  /// Both of the pool's dtype and device; null data is accepted where n is 0.
  /// Throws InvalidArgument before anything is written.
  void append(int32_t layer, std::span<const int64_t> slots, const ConstTensor<2>& ckv,
              const ConstTensor<2>& kpe, Stream stream = {});

  /// The same with slots [n] on the pool's device, which a captured append reads anew at each
  /// replay. They are not looked at on the host: one outside the pool is skipped, as -1 is. Throws
  /// InvalidArgument.
  void append_at(int32_t layer, const TensorView<const int64_t, 1>& slots,
                 const ConstTensor<2>& ckv, const ConstTensor<2>& kpe, Stream stream = {});

  /// Reads slots[i] into row i of `rows` [n, latent], any row stride; -1 leaves the row alone.
  /// Throws InvalidArgument before anything is written.
  void gather(int32_t layer, std::span<const int64_t> slots, const Tensor<2>& rows,
              Stream stream = {}) const;

  /// Copies whole pages in every layer, one after the other. Throws InvalidArgument (a page out of
  /// range) before anything is written.
  void copy_pages(std::span<const PageCopy> copies, Stream stream = {});

 private:
  friend class engine::PoolClaim;

  int64_t latent_width() const { return int64_t{config_.kv_lora_rank} + config_.qk_rope_head_dim; }
  void check_layer(const char* where, int32_t layer) const;
  void check_append(const char* where, int32_t layer, size_t num_rows, const ConstTensor<2>& ckv,
                    const ConstTensor<2>& kpe) const;
  device::Operations& operations() const;
  device::LayerRows rows_of(int32_t layer) const;
  std::byte* row(int32_t layer, int64_t slot) const;

  PoolConfig config_;
  std::byte* data_ = nullptr;
  size_t owned_bytes_ = 0;   // 0: lent
  bool is_claimed_ = false;  // of this object, not of the memory: a move leaves it where it is
};

}  // namespace mla
