#include "cpu/merge_states.hpp"

#include "cpu/merge_rows.hpp"

namespace mla::cpu {
namespace {

// Below this many values in all states together the caller's thread alone is done before a crew
// has been woken (a few microseconds).
constexpr int64_t kValuesWorthACrew = 1 << 16;

template <class Byte, class T, int Rank>
Byte* at(const TensorView<T, Rank>& tensor, int64_t token, int64_t head) {
  return static_cast<Byte*>(tensor.data) +
         (token * tensor.stride[0] + head * tensor.stride[1]) * size_of(tensor.dtype);
}

// Rows [begin, end) of [T, H] in row-major order.
void merge_range(std::span<const PartialState> states, const Tensor<3>& out,
                 const TensorView<float, 2>& lse, LseBase base, int64_t begin, int64_t end) {
  const int64_t num_heads = out.shape[1];
  for (int64_t r = begin; r < end; ++r) {
    const int64_t token = r / num_heads;
    const int64_t head = r % num_heads;
    const auto part = [&](int64_t i) -> PartialRow {
      const PartialState& state = states[static_cast<size_t>(i)];
      return {at<const char>(state.out, token, head), state.out.dtype,
              state.lse.data[token * state.lse.stride[0] + head * state.lse.stride[1]]};
    };
    const float merged = merge_row(static_cast<int64_t>(states.size()), part, base, out.shape[2],
                                   out.dtype, at<char>(out, token, head));
    if (lse.data != nullptr) {
      lse.data[token * lse.stride[0] + head * lse.stride[1]] = merged;
    }
  }
}

}  // namespace

void merge_states(std::span<const PartialState> states, const Tensor<3>& out,
                  const TensorView<float, 2>& lse, LseBase base, Executor* executor) {
  const int64_t num_rows = out.shape[0] * out.shape[1];
  const auto num_states = static_cast<int64_t>(states.size());
  if (executor == nullptr || num_rows * out.shape[2] * num_states < kValuesWorthACrew) {
    return merge_range(states, out, lse, base, 0, num_rows);
  }
  const int64_t num_workers = executor->num_threads();
  executor->run([&](int worker) {
    merge_range(states, out, lse, base, num_rows * worker / num_workers,
                num_rows * (worker + 1) / num_workers);
  });
}

}  // namespace mla::cpu
