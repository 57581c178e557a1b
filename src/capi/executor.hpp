#pragma once

#include <memory>
#include <utility>

#include "capi/handle.hpp"
#include "mla/executor.hpp"

/// The handle shares the executor with the objects that were created with it.
struct mla_executor  // NOLINT(readability-identifier-naming): declared by mla.h
    : mla::capi::Handle<mla_executor> {
  static constexpr const char* kName = "mla_executor";
  explicit mla_executor(std::shared_ptr<mla::Executor> executor) : shared(std::move(executor)) {}

  std::shared_ptr<mla::Executor> shared;
};

namespace mla::capi {

/// None where the handle is null: the callee's default.
inline std::shared_ptr<Executor> executor_from_c(const mla_executor* executor, const char* where) {
  return executor == nullptr ? nullptr : handle_from_c(executor, "executor", where).shared;
}

}  // namespace mla::capi
