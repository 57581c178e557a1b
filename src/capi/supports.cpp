#include "mla/supports.hpp"

#include <vector>

#include "capi/error.hpp"
#include "capi/from_c.hpp"

using namespace mla::capi;  // NOLINT(google-build-using-namespace): C calls live in no namespace

namespace {

// What the texts of this thread's last answer point into.
struct Answer {
  mla::Support support;
  std::vector<mla_kernel_verdict> considered;
};
thread_local Answer answer;

}  // namespace

mla_status mla_supports(const mla_geometry* geometry, mla_device device,
                        const mla_cache_strides* strides, const char* kernel,
                        mla_support* support) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_supports";
    const mla::Geometry shape = geometry_from_c(geometry, kWhere);
    const mla::Device on = device_from_c(device, "device", kWhere);
    not_null(support, "support", kWhere);
    std::optional<mla::CacheStrides> of_cache;
    if (strides != nullptr) of_cache = strides_from_c(*strides);

    Answer next{.support = mla::supports(shape, on, of_cache, kernel == nullptr ? "" : kernel),
                .considered = {}};
    answer = std::move(next);
    for (const mla::KernelVerdict& verdict : answer.support.considered) {
      answer.considered.push_back({verdict.kernel.c_str(), verdict.refusal.c_str()});
    }
    write_struct({.struct_size = 0,
                  .supported = answer.support ? 1 : 0,
                  .capturable = answer.support.capturable ? 1 : 0,
                  .kernel = answer.support.kernel.c_str(),
                  .reason = answer.support.reason.c_str(),
                  .considered = answer.considered.data(),
                  .num_considered = static_cast<int64_t>(answer.considered.size())},
                 support, "support", kWhere);
  });
}
