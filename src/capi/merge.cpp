#include "mla/merge.hpp"

#include <vector>

#include "capi/error.hpp"
#include "capi/executor.hpp"
#include "capi/from_c.hpp"

using namespace mla::capi;  // NOLINT(google-build-using-namespace): C calls live in no namespace

mla_status mla_merge_states(const mla_partial_state* states, int64_t num_states,
                            const mla_tensor* out, const mla_tensor* lse, int32_t base,
                            mla_executor* executor, void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_merge_states";
    thread_local std::vector<mla::PartialState> views;  // kept, so that it stops allocating
    views.clear();
    for (const mla_partial_state& state : array_from_c(states, num_states, "states", kWhere)) {
      views.push_back({.out = tensor_from_c<3>(state.out, "states[].out", kWhere),
                       .lse = typed_from_c<float, 2>(state.lse, "states[].lse", kWhere),
                       .lse_base = lse_base_from_c(state.lse_base, kWhere)});
    }
    const auto merged = tensor_from_c<3>(not_null(out, "out", kWhere), "out", kWhere);
    const auto merged_lse =
        lse == nullptr ? mla::TensorView<float, 2>{} : typed_from_c<float, 2>(*lse, "lse", kWhere);
    mla::merge_states(views, merged, merged_lse, lse_base_from_c(base, kWhere),
                      executor_from_c(executor, kWhere).get(), {.handle = stream});
  });
}
