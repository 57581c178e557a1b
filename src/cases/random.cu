#include "cases/random.hpp"
#include "cuda/device_guard.hpp"
#include "cuda/launch.hpp"
#include "cuda/numbers.cuh"

namespace mla::cases {
namespace {

constexpr int kThreads = 256;

// A block a row.
__global__ void __launch_bounds__(kThreads)
    draw_rows(const uint64_t* keys, DType dtype, void* out, int64_t columns) {
  const int64_t row = blockIdx.x;
  const uint64_t key = keys[row];
  for (int64_t column = threadIdx.x; column < columns; column += kThreads) {
    cuda::store_float(uniform_value(key, static_cast<uint32_t>(column)), out, dtype,
                      row * columns + column);
  }
}

}  // namespace

void fill_uniform_rows(const uint64_t* keys, int64_t num_rows, DType dtype, void* out,
                       int64_t columns, Device device, Stream stream) {
  if (num_rows == 0 || columns == 0) return;
  const cuda::DeviceGuard guard(device.index);
  cuda::launch_kernel("draw_rows", draw_rows,
                      {.count = static_cast<unsigned>(num_rows), .threads = kThreads}, stream, keys,
                      dtype, out, columns);
}

}  // namespace mla::cases
