#include "mla/merge.hpp"

#include <algorithm>
#include <string>

#include "core/checks.hpp"
#include "core/tensor_checks.hpp"
#include "cpu/merge_rows.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

constexpr const char* kWhere = "merge_states";
// Below this many values in all states together the caller's thread alone is done before a crew
// has been woken (a few microseconds).
constexpr int64_t kValuesWorthACrew = 1 << 16;

const char* name_of_base(LseBase base) { return base == LseBase::kTwo ? "base 2" : "base e"; }

void check_values(const TensorName& name, const ConstTensor<3>& tensor,
                  const std::array<int64_t, 3>& shape) {
  check_tensor(name, tensor, shape, tensor.dtype, Device{});
  if (tensor.dtype != DType::kFloat32 && tensor.dtype != DType::kBFloat16 &&
      tensor.dtype != DType::kFloat16) {
    refuse_tensor(name, ".dtype", "fp32, bf16 or fp16", std::string(name_of(tensor.dtype)));
  }
  check_columns(name, tensor.shape[2], tensor.stride[2]);
  check_row_strides(name, row_strides(tensor));
}

void check_lse(const TensorName& name, const TensorView<const float, 2>& lse,
               const std::array<int64_t, 3>& shape) {
  check_tensor(name, lse, {shape[0], shape[1]}, DType::kFloat32, Device{});
  check_row_strides(name, row_strides(lse));
}

void check(std::span<const PartialState> states, const Tensor<3>& out,
           const TensorView<float, 2>& lse, LseBase base) {
  check_lse_base(base, "base", kWhere);
  if (states.empty()) {
    throw_invalid({.what = "states.size()", .where = kWhere, .expected = "at least 1", .got = "0"});
  }
  const TensorName out_name{kWhere, "out"};
  if (out.shape[0] < 0 || out.shape[1] < 0 || out.shape[2] < 1) {
    refuse_tensor(out_name, ".shape", "[0 or more, 0 or more, 1 or more]", to_string(out.shape));
  }
  check_values(out_name, out, out.shape);
  check_rows_apart(out_name, row_strides(out));
  if (lse.data != nullptr) {
    check_lse({kWhere, "lse"}, lse, out.shape);
    check_rows_apart({kWhere, "lse"}, row_strides(lse));
  }
  for (size_t i = 0; i < states.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (states[i].lse_base != base) {
      refuse_tensor({kWhere, "lse_base", index}, "",
                    std::string(name_of_base(base)) + ", the base of this merge",
                    name_of_base(states[i].lse_base));
    }
    check_values({kWhere, "out", index}, states[i].out, out.shape);
    check_lse({kWhere, "lse", index}, states[i].lse, out.shape);
  }
}

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
    const auto part = [&](int64_t i) -> cpu::PartialRow {
      const PartialState& state = states[static_cast<size_t>(i)];
      return {at<const char>(state.out, token, head), state.out.dtype,
              state.lse.data[token * state.lse.stride[0] + head * state.lse.stride[1]]};
    };
    const float merged = cpu::merge_row(static_cast<int64_t>(states.size()), part, base,
                                        out.shape[2], out.dtype, at<char>(out, token, head));
    if (lse.data != nullptr) {
      lse.data[token * lse.stride[0] + head * lse.stride[1]] = merged;
    }
  }
}

}  // namespace

void merge_states(std::span<const PartialState> states, const Tensor<3>& out,
                  const TensorView<float, 2>& lse, LseBase base, Executor* executor) {
  check(states, out, lse, base);
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

}  // namespace mla
