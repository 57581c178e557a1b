#include <sys/mman.h>

#include <new>
#include <string>
#include <utility>

#include "core/checks.hpp"
#include "device/operations.hpp"
#include "device/runtime.hpp"
#include "mla/error.hpp"
#include "mla/pool.hpp"

namespace mla {
namespace {

void check_range(const char* what, const char* where, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw_invalid({.what = what,
                 .where = where,
                 .expected = std::to_string(low) + " to " + std::to_string(high),
                 .got = std::to_string(value)});
}

size_t checked_bytes(const PoolConfig& config, const char* where) {
  device::runtime_of(config.device, "config.device", where);  // refuses one that is not there
  if (config.dtype != DType::kFloat32 && config.dtype != DType::kBFloat16 &&
      config.dtype != DType::kFloat16) {
    throw_invalid(
        {"config.dtype", where, "fp32, bf16 or fp16", std::string(name_of(config.dtype))});
  }
  check_range("config.num_layers", where, config.num_layers, 1, INT32_MAX);
  check_range("config.num_pages", where, config.num_pages, 1, kMaxPoolPages - 1);
  check_range("config.page_size", where, config.page_size, 1, INT32_MAX);
  check_range("config.kv_lora_rank", where, config.kv_lora_rank, 1, kMaxLatentWidth);
  check_range("config.qk_rope_head_dim", where, config.qk_rope_head_dim, 0,
              kMaxLatentWidth - config.kv_lora_rank);
  const int64_t latent = int64_t{config.kv_lora_rank} + config.qk_rope_head_dim;
  int64_t bytes = latent * size_of(config.dtype);
  if (__builtin_mul_overflow(bytes, config.page_size, &bytes) ||
      __builtin_mul_overflow(bytes, config.num_pages + 1, &bytes) ||
      __builtin_mul_overflow(bytes, config.num_layers, &bytes)) {
    throw_invalid({.what = "config",
                   .where = where,
                   .expected = "at most 2^63 - 1 bytes",
                   .got = std::to_string(config.num_layers) + " layers of " +
                          std::to_string(config.num_pages + 1) + " pages of " +
                          std::to_string(config.page_size) + " rows of " + std::to_string(latent) +
                          " " + std::string(name_of(config.dtype))});
  }
  return static_cast<size_t>(bytes);
}

// Rows that append reads or gather writes: [num_rows, width] of the pool's dtype and device.
template <class View>
void check_rows(const char* what, const char* where, const PoolConfig& config, const View& rows,
                size_t num_rows, int64_t width) {
  const auto refuse = [&](const char* part, std::string expected, std::string got) {
    throw_invalid({std::string(what) + part, where, std::move(expected), std::move(got)});
  };
  const std::array<int64_t, 2> shape{static_cast<int64_t>(num_rows), width};
  if (rows.shape != shape) refuse(".shape", to_string(shape), to_string(rows.shape));
  if (rows.dtype != config.dtype) {
    refuse(".dtype", std::string(name_of(config.dtype)) + " as the pool",
           std::string(name_of(rows.dtype)));
  }
  if (rows.device != config.device) {
    refuse(".device", to_string(config.device), to_string(rows.device));
  }
  if (num_rows == 0) return;
  if (width > 1 && rows.stride[1] != 1) refuse(".stride[1]", "1", std::to_string(rows.stride[1]));
  if (rows.data == nullptr) refuse(".data", "memory", "null");
}

void check_slots(const char* where, std::span<const int64_t> slots, int64_t num_slots) {
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] >= -1 && slots[i] < num_slots) continue;
    throw_invalid({.what = "slots[" + std::to_string(i) + "]",
                   .where = where,
                   .expected = "-1 to " + std::to_string(num_slots - 1),
                   .got = std::to_string(slots[i])});
  }
}

device::SourceRows source_of(const ConstTensor<2>& ckv, const ConstTensor<2>& kpe) {
  return {.ckv = static_cast<const std::byte*>(ckv.data),
          .kpe = static_cast<const std::byte*>(kpe.data),
          .ckv_stride = ckv.stride[0] * size_of(ckv.dtype),
          .kpe_stride = kpe.stride[0] * size_of(kpe.dtype)};
}

}  // namespace

size_t LatentPool::bytes(const PoolConfig& config) {
  return checked_bytes(config, "LatentPool::bytes");
}

LatentPool::LatentPool(const PoolConfig& config) : config_(config) {
  const size_t needed = checked_bytes(config, "LatentPool");
  if (!config.memory.empty()) {
    check_lent_memory(config.memory, needed, "config.memory", "LatentPool");
    data_ = config.memory.data();
    return;
  }
  device::Runtime& runtime = device::runtime_of(config.device);
  if (!device::runs_on_host(config.device)) {
    data_ = static_cast<std::byte*>(runtime.allocate(needed));
    runtime.fill(data_, 0, needed, Stream{});
    runtime.synchronize(Stream{});
    owned_bytes_ = needed;
    return;
  }
  // Mapped, not allocated: pages that nobody writes to take no memory, however large the pool.
  void* mapped = mmap(nullptr, needed, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(mapped);
  owned_bytes_ = needed;
}

LatentPool::~LatentPool() {
  if (owned_bytes_ == 0) return;
  if (device::runs_on_host(config_.device)) {
    munmap(data_, owned_bytes_);
  } else {
    device::runtime_of(config_.device).release(data_);
  }
}

LatentPool::LatentPool(LatentPool&& other) noexcept
    : config_(other.config_),
      data_(std::exchange(other.data_, nullptr)),
      owned_bytes_(std::exchange(other.owned_bytes_, 0)) {}

LatentPool& LatentPool::operator=(LatentPool&& other) noexcept {
  std::swap(config_, other.config_);
  std::swap(data_, other.data_);
  std::swap(owned_bytes_, other.owned_bytes_);
  return *this;
}

Tensor<3> LatentPool::layer(int32_t layer) {
  check_layer("LatentPool::layer", layer);
  return contiguous_view(static_cast<void*>(row(layer, 0)),
                         std::array{total_pages(), int64_t{config_.page_size}, latent_width()},
                         config_.dtype, config_.device);
}

ConstTensor<3> LatentPool::layer(int32_t layer) const {
  check_layer("LatentPool::layer", layer);
  return contiguous_view(static_cast<const void*>(row(layer, 0)),
                         std::array{total_pages(), int64_t{config_.page_size}, latent_width()},
                         config_.dtype, config_.device);
}

LatentViews LatentPool::views(int32_t layer) const {
  return split_latent(this->layer(layer), config_.kv_lora_rank);
}

void LatentPool::check_append(const char* where, int32_t layer, size_t num_rows,
                              const ConstTensor<2>& ckv, const ConstTensor<2>& kpe) const {
  check_layer(where, layer);
  check_rows("ckv", where, config_, ckv, num_rows, config_.kv_lora_rank);
  if (config_.qk_rope_head_dim > 0) {
    check_rows("kpe", where, config_, kpe, num_rows, config_.qk_rope_head_dim);
  }
}

void LatentPool::append(int32_t layer, std::span<const int64_t> slots, const ConstTensor<2>& ckv,
                        const ConstTensor<2>& kpe, Stream stream) {
  constexpr const char* kWhere = "LatentPool::append";
  check_append(kWhere, layer, slots.size(), ckv, kpe);
  check_slots(kWhere, slots, total_pages() * config_.page_size);
  operations().scatter_rows(rows_of(layer), slots, source_of(ckv, kpe), stream);
}

void LatentPool::append_at(int32_t layer, const TensorView<const int64_t, 1>& slots,
                           const ConstTensor<2>& ckv, const ConstTensor<2>& kpe, Stream stream) {
  constexpr const char* kWhere = "LatentPool::append_at";
  if (slots.device != config_.device) {
    throw_invalid({"slots.device", kWhere, to_string(config_.device), to_string(slots.device)});
  }
  if (slots.shape[0] < 0) {
    throw_invalid({"slots.shape[0]", kWhere, "0 or more", std::to_string(slots.shape[0])});
  }
  const auto num_rows = static_cast<size_t>(slots.shape[0]);
  if (num_rows > 0 && slots.data == nullptr) {
    throw_invalid({"slots.data", kWhere, "memory", "null"});
  }
  if (num_rows > 1 && slots.stride[0] != 1) {
    throw_invalid({"slots.stride[0]", kWhere, "1", std::to_string(slots.stride[0])});
  }
  check_append(kWhere, layer, num_rows, ckv, kpe);
  operations().scatter_rows_at(rows_of(layer), slots.data, slots.shape[0], source_of(ckv, kpe),
                               stream);
}

void LatentPool::gather(int32_t layer, std::span<const int64_t> slots, const Tensor<2>& rows,
                        Stream stream) const {
  constexpr const char* kWhere = "LatentPool::gather";
  check_layer(kWhere, layer);
  check_rows("rows", kWhere, config_, rows, slots.size(), latent_width());
  check_slots(kWhere, slots, total_pages() * config_.page_size);
  operations().gather_rows(rows_of(layer), slots, static_cast<std::byte*>(rows.data),
                           rows.stride[0] * size_of(rows.dtype), stream);
}

void LatentPool::copy_pages(std::span<const PageCopy> copies, Stream stream) {
  for (size_t i = 0; i < copies.size(); ++i) {
    for (const int32_t page : {copies[i].from, copies[i].to}) {
      if (page >= 0 && page < total_pages()) continue;
      throw_invalid(
          {.what = "copies[" + std::to_string(i) + "]",
           .where = "LatentPool::copy_pages",
           .expected = "pages 0 to " + std::to_string(total_pages() - 1),
           .got = std::to_string(copies[i].from) + " to " + std::to_string(copies[i].to)});
    }
  }
  if (copies.empty()) return;
  const int64_t page_bytes = config_.page_size * latent_width() * size_of(config_.dtype);
  operations().copy_pages({.data = data_,
                           .num_layers = config_.num_layers,
                           .layer_bytes = page_bytes * total_pages(),
                           .page_bytes = page_bytes},
                          copies, stream);
}

void LatentPool::check_layer(const char* where, int32_t layer) const {
  if (layer >= 0 && layer < config_.num_layers) return;
  throw_invalid(
      {"layer", where, "0 to " + std::to_string(config_.num_layers - 1), std::to_string(layer)});
}

device::Operations& LatentPool::operations() const {
  return device::runtime_of(config_.device).operations();
}

device::LayerRows LatentPool::rows_of(int32_t layer) const {
  const int64_t element = size_of(config_.dtype);
  return {.data = row(layer, 0),
          .num_slots = total_pages() * config_.page_size,
          .ckv_bytes = config_.kv_lora_rank * element,
          .kpe_bytes = config_.qk_rope_head_dim * element};
}

std::byte* LatentPool::row(int32_t layer, int64_t slot) const {
  const int64_t row_idx = layer * total_pages() * config_.page_size + slot;
  return data_ + row_idx * latent_width() * size_of(config_.dtype);
}

}  // namespace mla
