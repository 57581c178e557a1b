#include "mla/merge.hpp"

#include <string>

#include "core/checks.hpp"
#include "core/tensor_checks.hpp"
#include "device/operations.hpp"
#include "device/runtime.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

constexpr const char* kWhere = "merge_states";
const char* name_of_base(LseBase base) { return base == LseBase::kTwo ? "base 2" : "base e"; }

void check_values(const TensorName& name, const ConstTensor<3>& tensor,
                  const std::array<int64_t, 3>& shape, Device device) {
  check_tensor(name, tensor, shape, tensor.dtype, device);
  if (tensor.dtype != DType::kFloat32 && tensor.dtype != DType::kBFloat16 &&
      tensor.dtype != DType::kFloat16) {
    refuse_tensor(name, ".dtype", "fp32, bf16 or fp16", std::string(name_of(tensor.dtype)));
  }
  check_columns(name, tensor.shape[2], tensor.stride[2]);
  check_row_strides(name, row_strides(tensor));
}

void check_lse(const TensorName& name, const TensorView<const float, 2>& lse,
               const std::array<int64_t, 3>& shape, Device device) {
  check_tensor(name, lse, {shape[0], shape[1]}, DType::kFloat32, device);
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
  check_values(out_name, out, out.shape, out.device);
  check_rows_apart(out_name, row_strides(out));
  if (lse.data != nullptr) {
    check_lse({kWhere, "lse"}, lse, out.shape, out.device);
    check_rows_apart({kWhere, "lse"}, row_strides(lse));
  }
  for (size_t i = 0; i < states.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (states[i].lse_base != base) {
      refuse_tensor({kWhere, "lse_base", index}, "",
                    std::string(name_of_base(base)) + ", the base of this merge",
                    name_of_base(states[i].lse_base));
    }
    check_values({kWhere, "out", index}, states[i].out, out.shape, out.device);
    check_lse({kWhere, "lse", index}, states[i].lse, out.shape, out.device);
  }
}

// out and lse have no byte of each other, nor of a state, whose very tensors they may be.
void check_outputs_apart(std::span<const PartialState> states, const Tensor<3>& out,
                         const TensorView<float, 2>& lse) {
  const ByteRows out_rows = byte_rows(out);
  const ByteRows lse_rows = lse.data == nullptr ? ByteRows{} : byte_rows(lse);
  const TensorName out_name{kWhere, "out"}, lse_name{kWhere, "lse"};
  check_apart(lse_name, lse_rows, out_name, out_rows);
  for (size_t i = 0; i < states.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const TensorName state_out{kWhere, "out", index}, state_lse{kWhere, "lse", index};
    const ByteRows values = byte_rows(states[i].out), sums = byte_rows(states[i].lse);
    if (values != out_rows) check_apart(out_name, out_rows, state_out, values);
    if (sums != lse_rows) check_apart(lse_name, lse_rows, state_lse, sums);
    check_apart(out_name, out_rows, state_lse, sums);
    check_apart(lse_name, lse_rows, state_out, values);
  }
}

}  // namespace

void merge_states(std::span<const PartialState> states, const Tensor<3>& out,
                  const TensorView<float, 2>& lse, LseBase base, Executor* executor,
                  Stream stream) {
  device::Runtime& runtime = device::runtime_of(out.device, "out.device", kWhere);
  check(states, out, lse, base);
  if (out.empty()) return;
  check_outputs_apart(states, out, lse);
  runtime.operations().merge_states(states, out, lse, base, executor, stream);
}

}  // namespace mla
