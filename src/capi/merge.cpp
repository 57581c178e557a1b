#include "mla/merge.hpp"

#include <vector>

#include "capi/error.hpp"
#include "capi/executor.hpp"
#include "capi/from_c.hpp"

using namespace mla::capi;  // NOLINT(google-build-using-namespace): C calls live in no namespace

mla_status mla_merge_states(const mla_partial_state* states, int64_t num_states,
                            const mla_tensor* out, const mla_tensor* lse, int32_t base,
                            mla_executor* executor) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_merge_states";
    if (num_states < 0) {
      mla::throw_invalid({.what = "num_states",
                          .where = kWhere,
                          .expected = "1 or more",
                          .got = std::to_string(num_states)});
    }
    if (num_states > 0) not_null(states, "states", kWhere);
    thread_local std::vector<mla::PartialState> views;  // kept, so that it stops allocating
    views.clear();
    for (int64_t i = 0; i < num_states; ++i) {
      views.push_back({.out = tensor_from_c<3>(states[i].out, "states[].out", kWhere),
                       .lse = typed_from_c<float, 2>(states[i].lse, "states[].lse", kWhere),
                       .lse_base = lse_base_from_c(states[i].lse_base, kWhere)});
    }
    const auto merged = tensor_from_c<3>(not_null(out, "out", kWhere), "out", kWhere);
    const auto merged_lse =
        lse == nullptr ? mla::TensorView<float, 2>{} : typed_from_c<float, 2>(*lse, "lse", kWhere);
    mla::merge_states(views, merged, merged_lse, lse_base_from_c(base, kWhere),
                      executor_from_c(executor, kWhere).get());
  });
}
