// What needs no object of its own: supports, merge_states, the version.
#include <string>
#include <vector>

#include "config.hpp"
#include "export.hpp"
#include "mla/merge.hpp"
#include "mla/supports.hpp"
#include "mla/version.hpp"

namespace mla::py {

namespace ffi = tvm::ffi;

namespace {

ffi::String version() { return mla::version(); }

/// kernel, capturable, rounds_probabilities, reason, then kernel and refusal of each considered.
ffi::Array<ffi::Any> supports(const Fields& geometry, int64_t device_kind, int64_t device_index,
                              const ffi::Optional<Fields>& strides, const ffi::String& kernel) {
  const Support support =
      mla::supports(geometry_from(geometry, "supports"), device_from(device_kind, device_index),
                    strides_from(strides), text_of(kernel));
  ffi::Array<ffi::Any> answer{ffi::String(support.kernel), support.capturable,
                              support.rounds_probabilities, ffi::String(support.reason)};
  for (const KernelVerdict& verdict : support.considered) {
    answer.push_back(ffi::String(verdict.kernel));
    answer.push_back(ffi::String(verdict.refusal));
  }
  return answer;
}

void merge_states(const ffi::Array<ffi::Tensor>& outs, const ffi::Array<ffi::Tensor>& lses,
                  ffi::TensorView out, const ffi::Optional<ffi::TensorView>& lse, int64_t lse_base,
                  const ffi::Optional<ExecutorBox>& executor, int64_t stream) {
  constexpr const char* kWhere = "merge_states";
  const auto base = static_cast<LseBase>(lse_base);
  std::vector<PartialState> states;
  states.reserve(outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    const std::string state = "states[" + std::to_string(i) + "].";
    const std::string out_name = state + "out", lse_name = state + "lse";
    states.push_back(
        {.out = view_of<3>(ffi::TensorView(outs[i]), {out_name.c_str(), kWhere}),
         .lse = typed_view_of<float, 2>(ffi::TensorView(lses[i]), {lse_name.c_str(), kWhere}),
         .lse_base = base});
  }
  const std::shared_ptr<Executor> crew = executor.has_value() ? **executor : Executor::shared();
  mla::merge_states(states, view_of<3>(out, {"out", kWhere}),
                    typed_view_of<float, 2>(lse, {"lse", kWhere}), base, crew.get(),
                    stream_from(stream));
}

}  // namespace

MLA_PY_EXPORT(version)
MLA_PY_EXPORT(supports)
MLA_PY_EXPORT(merge_states)

}  // namespace mla::py
