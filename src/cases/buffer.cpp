#include "cases/buffer.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "device/runtime.hpp"

namespace mla::cases {
namespace {

constexpr size_t kGuard = 64;  // bytes; keeps the memory between the guards 64-byte aligned
constexpr size_t kSparseAbove = size_t{256} << 20;
constexpr int kGuardByte = 0xa5;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

float value_of(Poison poison) {
  switch (poison) {
    case Poison::kNan:
      return std::numeric_limits<float>::quiet_NaN();
    case Poison::kInf:
      return std::numeric_limits<float>::infinity();
    case Poison::kNone:
      break;
  }
  return 0;
}

template <class T>
void fill_with(T value, void* out, int64_t count) {
  std::fill_n(static_cast<T*>(out), count, value);
}

}  // namespace

Buffer::Buffer(size_t bytes, size_t offset, Device device) : size_(bytes) {
  if (bytes <= kSparseAbove) {
    block_bytes_ = round_up(kGuard + offset + bytes + kGuard, kGuard);
    block_ = static_cast<std::byte*>(std::aligned_alloc(kGuard, block_bytes_));
    if (block_ == nullptr) throw std::bad_alloc();
    std::memset(block_, kGuardByte, block_bytes_);
    data_ = block_ + kGuard + offset;
    std::memset(data_, 0, bytes);
  } else {
    const size_t page = page_bytes();
    block_bytes_ = round_up(offset + bytes, page);
    void* block = mmap(nullptr, block_bytes_ + 2 * page, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) throw std::bad_alloc();
    block_ = static_cast<std::byte*>(block);
    mapped_ = block_bytes_ + 2 * page;
    if (mprotect(block_ + page, block_bytes_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    data_ = block_ + page + offset;
  }
  device_data_ = data_;
  if (device == Device{}) return;
  runtime_ = &device::runtime_of(device, "device", "Buffer");
  device_block_ = static_cast<std::byte*>(runtime_->allocate(block_bytes_));
  device_data_ = device_block_ + (data_ - first_byte());
  if (is_sparse()) {
    runtime_->fill(device_block_, 0xff, block_bytes_, {});
    runtime_->synchronize({});
  } else {
    upload();
  }
}

Buffer::~Buffer() {
  if (device_block_ != nullptr) runtime_->release(device_block_);
  if (mapped_ > 0) {
    munmap(block_, mapped_);
  } else {
    std::free(block_);
  }
}

std::byte* Buffer::first_byte() const { return is_sparse() ? block_ + page_bytes() : block_; }

void Buffer::upload() const {
  if (device_block_ == nullptr) return;
  if (!is_sparse()) {
    runtime_->copy_to_device(device_block_, block_, block_bytes_, {});
  } else {
    const size_t page = page_bytes();
    std::vector<unsigned char> resident(block_bytes_ / page);
    if (mincore(first_byte(), block_bytes_, resident.data()) != 0) throw std::bad_alloc();
    for (size_t begin = 0; begin < resident.size();) {
      size_t end = begin;
      while (end < resident.size() && (resident[end] & 1U) == (resident[begin] & 1U)) ++end;
      if ((resident[begin] & 1U) != 0) {
        runtime_->copy_to_device(device_block_ + begin * page, first_byte() + begin * page,
                                 (end - begin) * page, {});
      }
      begin = end;
    }
  }
  runtime_->synchronize({});
}

void Buffer::download() const {
  if (device_block_ == nullptr || is_sparse()) return;
  runtime_->copy_to_host(block_, device_block_, block_bytes_, {});
  runtime_->synchronize({});
}

void Buffer::download(size_t offset, size_t bytes) const {
  if (device_block_ == nullptr) return;
  runtime_->copy_to_host(data_ + offset, device_data_ + offset, bytes, {});
  runtime_->synchronize({});
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(block_, other.block_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(block_bytes_, other.block_bytes_);
  std::swap(runtime_, other.runtime_);
  std::swap(device_block_, other.device_block_);
  std::swap(device_data_, other.device_data_);
  return *this;
}

bool Buffer::guards_intact() const {
  if (block_ == nullptr || is_sparse()) return true;  // a touched guard page ends the process
  const auto is_guard = [](std::byte b) { return b == std::byte{kGuardByte}; };
  return std::all_of(block_, data_, is_guard) &&
         std::all_of(data_ + size_, data_ + size_ + kGuard, is_guard);
}

uint64_t Buffer::fingerprint() const {
  if (is_sparse()) return 0;
  uint64_t state = size_;
  for (size_t at = 0; at < size_; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data_ + at, std::min<size_t>(8, size_ - at));
    state = (state ^ word) * 0xd6e8feb86659fd93U;
    state ^= state >> 32;
  }
  return state;
}

void fill_poison(Poison poison, DType dtype, void* out, int64_t count) {
  if (count <= 0) return;
  const float value = value_of(poison);
  switch (dtype) {
    case DType::kBFloat16:
      return fill_with(BFloat16(value), out, count);
    case DType::kFloat16:
      return fill_with(Float16(value), out, count);
    default:
      return fill_with(value, out, count);
  }
}

}  // namespace mla::cases
