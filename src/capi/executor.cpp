#include "capi/executor.hpp"

#include "capi/error.hpp"
#include "capi/from_c.hpp"

using namespace mla::capi;  // NOLINT(google-build-using-namespace): C calls live in no namespace

mla_status mla_executor_create(int32_t num_threads, mla_executor** executor) noexcept {
  return guard([&] {
    not_null(executor, "executor", "mla_executor_create");
    *executor =
        std::make_unique<mla_executor>(std::make_shared<mla::Executor>(num_threads)).release();
  });
}

void mla_executor_destroy(mla_executor* executor) noexcept { destroy(executor); }

int32_t mla_executor_num_threads(const mla_executor* executor) noexcept {
  return is_handle(executor) ? executor->shared->num_threads() : 0;
}
