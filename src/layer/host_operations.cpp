#include "layer/host_operations.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "layer/gemm.hpp"
#include "layer/rows.hpp"
#include "mla/geometry.hpp"

namespace mla::layer {
namespace {

constexpr int64_t kRowsOfAWorker = 8;  // about 10 us, what waking a worker costs

// cos and sin of one token's pairs.
struct Angles {
  float cos[kMaxLatentWidth / 2];
  float sin[kMaxLatentWidth / 2];
};

// to = norm(from), one row; sums in double, rounded once.
void norm_row(const float* from, const Norm& norm, void* to, DType dtype) {
  double squares = 0;
  for (int64_t c = 0; c < norm.width; ++c) squares += double{from[c]} * from[c];
  const double mean = squares / static_cast<double>(norm.width);
  const auto scale = static_cast<float>(1 / std::sqrt(mean + norm.eps));
  with_type(dtype, [&](auto type) {
    for (int64_t c = 0; c < norm.width; ++c) {
      store<decltype(type)>(to, c, from[c] * scale * norm.weights[c]);
    }
  });
}

template <class T, int Rank>
auto at(const TensorView<T, Rank>& view, int64_t offset) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return static_cast<Byte*>(view.data) + offset * size_of(view.dtype);
}

}  // namespace

HostOperations::HostOperations(std::shared_ptr<Executor> executor)
    : executor_(executor ? std::move(executor) : Executor::shared()) {}

template <class Fn>
void HostOperations::share(int64_t count, const Fn& fn) {
  const int64_t workers = std::min<int64_t>(executor_->num_threads(), count / kRowsOfAWorker);
  if (workers <= 1) return fn(int64_t{0}, int64_t{1});
  executor_->run([&](int worker) {
    if (worker < workers) fn(int64_t{worker}, workers);
  });
}

void HostOperations::gemm(const ConstTensor<3>& x, const ConstTensor<3>& w, const Tensor<3>& y,
                          Stream /*stream*/) {
  layer::gemm(x, w, y, *executor_);
}

void HostOperations::norm_rows(const ConstTensor<2>& latents, const Norm& norm, const Tensor<2>& to,
                               Stream /*stream*/) {
  const auto* rows = static_cast<const float*>(latents.data);
  const int64_t count = latents.shape[0];
  share(count, [&](int64_t worker, int64_t workers) {
    for (int64_t t = count * worker / workers; t < count * (worker + 1) / workers; ++t) {
      norm_row(rows + t * norm.width, norm, at(to, t * norm.width), to.dtype);
    }
  });
}

void HostOperations::turn_queries(const ConstTensor<3>& q, const int32_t* positions,
                                  const Rope& rope, const Tensor<3>& to, Stream /*stream*/) {
  const auto [count, num_heads, width] = q.shape;
  share(count, [&, num_heads = num_heads, count = count](int64_t worker, int64_t workers) {
    Angles angles;
    for (int64_t t = count * worker / workers; t < count * (worker + 1) / workers; ++t) {
      fill_angles(rope, positions[t], angles.cos, angles.sin);
      for (int64_t h = 0; h < num_heads; ++h) {
        turn(rope, at(q, t * q.stride[0] + h * q.stride[1]), q.dtype,
             at(to, t * to.stride[0] + h * to.stride[1]), to.dtype, angles.cos, angles.sin);
      }
    }
  });
}

// Rows, not tokens, are dealt to the workers: those with one slot meet in one worker, in order.
void HostOperations::store_latents(const ConstTensor<2>& latents, const int32_t* positions,
                                   const Norm& norm, const Rope& rope, const LatentRows& to,
                                   Stream /*stream*/) {
  const int64_t width = norm.width + rope.width;
  share(latents.shape[0], [&](int64_t worker, int64_t workers) {
    Angles angles;
    for (int64_t t = 0; t < latents.shape[0]; ++t) {
      const int64_t row = to.slots == nullptr ? t : to.slots[t];
      if (row < 0 || row >= to.num_rows || row % workers != worker) continue;
      const float* from = static_cast<const float*>(latents.data) + t * width;
      std::byte* target = static_cast<std::byte*>(to.data) + row * width * size_of(to.dtype);
      norm_row(from, norm, target, to.dtype);
      if (rope.width == 0) continue;
      fill_angles(rope, positions[t], angles.cos, angles.sin);
      turn(rope, from + norm.width, DType::kFloat32, target + norm.width * size_of(to.dtype),
           to.dtype, angles.cos, angles.sin);
    }
  });
}

}  // namespace mla::layer
